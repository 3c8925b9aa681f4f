"""torch.distributed.pipelining: a process a stage, tensors sent over gloo, ``Schedule1F1B``.

Two worker processes live as long as the candidate. Between steps they are blocked on a pipe to the
parent, and take nothing from the others. A step's time is the workers' own: from the moment at
which the first of them leaves a barrier to the moment at which the last is done; the command's way
through the pipe is not in it, since a training script would not have one.
"""

import contextlib
import io
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from candidates import Candidate, Task, gradients_of
from measure import Seconds
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workloads import WORKLOADS


class Separate(nn.Module):
    """A stage that takes the border's tensors one by one, as PipelineStage hands them over.

    The gradients that it sends back are made contiguous, which is a patch: in torch 2.15
    PipelineStage makes a buffer to receive each in, with the strides that it sees at the first
    step, and gloo refuses one that is not contiguous. A U-Net's skip has such a gradient, half of
    that of a concatenation.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *border: Tensor) -> Any:
        if border[0].requires_grad:
            border = tuple(t.view_as(t) for t in border)  # hooks for this forward alone
            for tensor in border:
                tensor.register_hook(Tensor.contiguous)
        return self.stage(border if len(border) > 1 else border[0])


class TorchPipelining(Candidate):
    """Two processes of torch.distributed.pipelining."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.meeting = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")  # threads run already: no fork
        self.pipes, self.workers = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, Path(self.meeting.name, "store"), task.name, task.chunks)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()  # so that a worker's death is an EOFError here
            self.pipes.append(ours)
            self.workers.append(worker)

    def _ask(self, command: str) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self.pipes]

    def step(self) -> Seconds:
        begun, ended = zip(*self._ask("step"), strict=True)
        return Seconds(max(ended) - min(begun))

    def gradients(self) -> list[Tensor]:
        return [g for blob in self._ask("gradients") for g in torch.load(io.BytesIO(blob))]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join()
        self.meeting.cleanup()


def _work(pipe: Connection, rank: int, store: Path, name: str, chunks: int) -> None:
    """A worker's life, until the parent closes the pipe."""
    workload = WORKLOADS[name]
    model, x, y = workload.sample(chunks)  # the parent's, made again: the seed is fixed
    module = Separate(model[rank])
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    schedule = Schedule1F1B(
        PipelineStage(module, rank, 2, torch.device("cpu")),
        chunks,
        loss_fn=lambda output, target: workload.loss(output, target) / chunks,
        scale_grads=False,  # the loss is weighted already, as in the plain loop
    )
    with contextlib.suppress(EOFError):
        while True:
            if pipe.recv() == "gradients":
                blob = io.BytesIO()
                torch.save(gradients_of(module.parameters()), blob)
                pipe.send(blob.getvalue())
                continue
            dist.barrier()
            begun = time.perf_counter()  # one clock for all processes of a machine
            if rank == 0:
                schedule.step(x, return_outputs=False)
            else:
                losses: list[Tensor] = []
                schedule.step(target=y, losses=losses, return_outputs=False)
                torch.stack(losses).sum()
            pipe.send((begun, time.perf_counter()))
    dist.destroy_process_group()
