"""The other libraries that pipeline a model inside one process, and the patches they need.

torchgpipe and fairscale's copy of it are run twice: as shipped, and with one patch. They key their
worker threads by device, so that all stages on the CPU share *one* thread and no two forwards
overlap. That is right for CUDA, where a thread only launches, and hides what the design can do on
the CPU. The patch gives each stage a worker of its own. Backwards overlap in neither: autograd runs
a CPU graph in the thread that asks for it, and both ask once, for the whole batch.

No other patch is needed with torch 2.15: both import and run as they are. What
torch.distributed.pipelining needs is said in two_processes.py.
"""

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from candidates import Candidate, Task
from torch import Tensor

Queues = tuple[list[Any], list[Any]]  # of tasks for the workers, and of their answers


class WholeBatch(Candidate):
    """What is used as a module: one call for the batch, one backward through all micro-batches."""

    pipe: torch.nn.Module

    def step(self) -> Tensor:
        task = self.task
        loss = task.workload.loss(self.pipe(task.x), task.y)
        loss.backward()
        return loss.detach()


class Torchgpipe(WholeBatch):
    """torchgpipe 0.0.7 as shipped."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        torchgpipe = importlib.import_module("torchgpipe")
        self.pipe = torchgpipe.GPipe(self.model, **_options(task))


class TorchgpipePatched(Torchgpipe):
    """torchgpipe with one worker a stage. It starts its workers anew at each call."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        pipeline = importlib.import_module("torchgpipe.pipeline")
        spawn_workers = pipeline.spawn_workers

        @contextlib.contextmanager
        def worker_each(devices: Sequence[torch.device]) -> Iterator[Queues]:
            with contextlib.ExitStack() as stack:
                yield _joined([stack.enter_context(spawn_workers([d])) for d in devices])

        self.patch = mock.patch.object(pipeline, "spawn_workers", worker_each)

    def step(self) -> Tensor:
        with self.patch:
            return super().step()


class Fairscale(WholeBatch):
    """fairscale 0.4.13's Pipe as shipped."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        with warnings.catch_warnings():  # it says that it is deprecated, and whatever it imports
            warnings.simplefilter("ignore")
            pipe = importlib.import_module("fairscale.nn.pipe")
            self.pipe = pipe.Pipe(self.model, **_options(task))

    def close(self) -> None:
        del self.pipe  # its destructor joins the workers


class FairscalePatched(Fairscale):
    """fairscale's Pipe with one worker a stage. It starts its workers once, when it is made."""

    def __init__(self, task: Task) -> None:
        pipeline = importlib.import_module("fairscale.nn.pipe.pipeline")
        create_workers = pipeline.create_workers

        def worker_each(devices: Sequence[torch.device]) -> Queues:
            return _joined([create_workers([d]) for d in devices])

        with mock.patch.object(pipeline, "create_workers", worker_each):
            super().__init__(task)


def _options(task: Task) -> dict[str, Any]:
    """The two take the same ones."""
    return {
        "balance": [1, 1],
        "devices": ["cpu"] * 2,
        "chunks": task.chunks,
        "checkpoint": task.checkpoint,
    }


def _joined(pairs: list[Queues]) -> Queues:
    """The queues of several groups of workers as if they were one group's."""
    return [q for tasks, _ in pairs for q in tasks], [q for _, answers in pairs for q in answers]
