"""Candidates of the benchmark of two processes, each of which fails in its own way.

Only for a process that has ``examples/benchmarks`` among its paths.
"""

import os
import signal
import time
from typing import Any

from torch import Tensor, nn
from two_processes import Processes, TorchTracer
from workloads import Workload, vectors


class Raises(Processes):
    """In one process, while the other one waits for it."""

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Any, list[Tensor]]:
        if rank:
            raise ValueError("no luck")
        return (lambda: None), []


class Dies(Processes):
    """In a step."""

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Any, list[Tensor]]:
        def step() -> None:
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

        return step, []


class Hangs(Processes):
    """Both do."""

    patience = 20.0

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Any, list[Tensor]]:
        return (lambda: time.sleep(600)), []


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Untraceable(TorchTracer):
    """The tracer, for a model that branches on its data."""

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Any, list[Tensor]]:
        branching = Workload(
            lambda: nn.Sequential(nn.Linear(16, 16), _Branching()), vectors(16), 4, workload.loss
        )
        return TorchTracer.make(branching, chunks, rank)
