"""The ways to do one step that need nothing but torch and Blockpipe.

Each does the same: the gradients of the batch's mean loss, micro-batch by micro-batch, added up in
``.grad``, and the loss as a number without a graph.
"""

import copy
import os
import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from workloads import Border, Workload

import blockpipe as bp


@dataclass(frozen=True)
class Task:
    """What all candidates do alike."""

    workload: Workload
    name: str  # of the workload
    chunks: int
    model: nn.Sequential
    x: Tensor
    y: Tensor
    checkpoint: str = "never"  # of those who can recompute


class Candidate:
    """A way to do the step, on a copy of the model."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = copy.deepcopy(task.model)

    def step(self) -> object:
        """Do one step."""
        raise NotImplementedError

    def gradients(self) -> list[Tensor]:
        """What the steps so far have added up, parameter by parameter."""
        return gradients_of(self.model.parameters())

    def close(self) -> None:
        """End what the candidate has started."""


def gradients_of(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Their gradients; each has one, since all that these models have is used."""
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return gradients


def plain_loop(task: Task, model: nn.Module, x: Tensor, y: Tensor, chunks: int) -> Tensor:
    """The loop that everybody writes; ``chunks`` of the task's micro-batches."""
    total = torch.zeros(())
    for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        loss = task.workload.loss(model(xs), ys) / task.chunks
        loss.backward()
        total += loss.detach()
    return total


class Plain(Candidate):
    """The plain micro-batch loop on one thread: what all others are compared to."""

    def step(self) -> Tensor:
        task = self.task
        return plain_loop(task, self.model, task.x, task.y, task.chunks)


class PlainTwoThreads(Plain):
    """The plain loop with two intra-op threads: what torch makes of two cores by itself.

    The threads spin for one another in every operation. Where others use one of the cores, this is
    the candidate that suffers most: runs of twenty times the usual length were seen.
    """

    def step(self) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return super().step()
        finally:
            torch.set_num_threads(before)


class TwoThreads(Candidate):
    """Independent threads, half of the micro-batches each, on two copies of the model.

    No pipeline, and not one model: this is what the machine can give to two threads of Python.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.twin = copy.deepcopy(task.model)
        self.threads = ThreadPoolExecutor(2)

    def step(self) -> Tensor:
        task = self.task
        halves = zip((self.model, self.twin), task.x.chunk(2), task.y.chunk(2), strict=True)
        jobs = [
            self.threads.submit(plain_loop, task, model, x, y, task.chunks // 2)
            for model, x, y in halves
        ]
        return sum((job.result() for job in jobs), torch.zeros(()))

    def gradients(self) -> list[Tensor]:
        theirs = gradients_of(self.twin.parameters())
        return [p + q for p, q in zip(super().gradients(), theirs, strict=True)]

    def close(self) -> None:
        self.threads.shutdown()


class ByHand(Candidate):
    """What one would write for this model: a thread a stage, 1F1B, graphs cut at the border."""

    pinned = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        cores = sorted(os.sched_getaffinity(0)) if self.pinned else [None, None]
        self.threads = [
            ThreadPoolExecutor(1, initializer=_stay_on, initargs=(core,)) for core in cores[:2]
        ]
        self.down: queue.SimpleQueue[Border] = queue.SimpleQueue()
        self.up: queue.SimpleQueue[Border] = queue.SimpleQueue()

    def step(self) -> Tensor:
        first, last = self.threads
        running = first.submit(self._first_stage)
        total = last.submit(self._last_stage).result()
        running.result()
        return total

    def _first_stage(self) -> None:
        held: list[Border] = []
        for xs in self.task.x.chunk(self.task.chunks):
            made = self.model[0](xs)
            outputs = made if isinstance(made, tuple) else (made,)
            self.down.put(tuple(t.detach().requires_grad_() for t in outputs))
            held.append(outputs)
            if len(held) == 2:  # one micro-batch ahead of the last stage is enough
                torch.autograd.backward(held.pop(0), self.up.get())
        torch.autograd.backward(held.pop(), self.up.get())

    def _last_stage(self) -> Tensor:
        total = torch.zeros(())
        for ys in self.task.y.chunk(self.task.chunks):
            border = self.down.get()
            output = self.model[1](border if len(border) > 1 else border[0])
            loss = self.task.workload.loss(output, ys) / self.task.chunks
            loss.backward()
            self.up.put(tuple(gradients_of(border)))
            total += loss.detach()
        return total

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


class ByHandPinned(ByHand):
    """The same with each thread kept to one core, as Blockpipe keeps its own."""

    pinned = True


def can_pin() -> bool:
    """Whether two threads can be kept to a core each: on Linux, with two cores or more."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


def _stay_on(core: int | None) -> None:
    """This thread runs on this core only; on any, if none is given."""
    if core is not None:
        os.sched_setaffinity(0, {core})


class Blockpipe(Candidate):
    """Two stages of Blockpipe."""

    package = bp
    schedule = "1f1b"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model[1] = self.package.BeginBlock(self.model[1], stage=1)
        self.pipe = self.package.Pipeline(
            self.model,
            devices=["cpu"] * 2,
            chunks=task.chunks,
            schedule=self.schedule,
            checkpoint=task.checkpoint,
        )

    def step(self) -> Tensor:
        task = self.task
        return self.pipe.forward_backward(task.x, target=task.y, loss_fn=task.workload.loss).loss

    def close(self) -> None:
        self.pipe.close()


class BlockpipeGpipe(Blockpipe):
    """The same in GPipe's order."""

    schedule = "gpipe"
