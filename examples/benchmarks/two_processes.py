"""Two processes, a stage each, tensors sent over gloo, 1F1B of torch.distributed.pipelining.

The stages are three: written by hand for the model, as torch's tracer makes them, and those of
``blockpipe.distributed``. The engine is the same for all.

Two worker processes live as long as the candidate. Between steps they are blocked on a pipe to the
parent, and take nothing from the others. A step's time is the workers' own: from the moment at
which the first of them leaves a barrier to the moment at which the last is done; the command's way
through the pipe is not in it, since a training script would not have one. The processor's time of
both is kept as well: other programs on the machine lengthen the one, and hardly the other.

A worker that fails says why, and one that does not answer in time is ended: the other candidates
are timed all the same.
"""

import contextlib
import datetime
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from candidates import Candidate, Task, gradients_of
from measure import Seconds
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from workloads import WORKLOADS, Workload

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline

Step = Callable[[], Tensor | None]  # returns the batch's loss, where it is known

_GOODBYE = 5.0  # seconds that a worker has to end by itself

# Of glibc's allocator, which else adapts to what a process has happened to free: some processes
# gave their memory back in each step, and spent a fifth of it on 28,000 page faults, others none.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


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


class ProcessesFailedError(Exception):
    """A candidate's processes raised an error, ended, or gave no answer in time.

    Args:
        candidate: whose processes they are.
        reason: what happened.
    """

    def __init__(self, candidate: "Processes", reason: str) -> None:
        super().__init__(reason)
        self.candidate = candidate


class Processes(Candidate):
    """Two processes of torch.distributed.pipelining.

    Attributes:
        patience: seconds in which a process has to answer; the first answer has the imports and
            the making of its stage in it.
        loss: the last step's.
        processor: of each step, the processor's seconds in both processes.
    """

    patience = 180.0
    loss: float

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Step, list[Tensor]]:
        """Make a process's step; return the parameters of its stage, in the model's order."""
        raise NotImplementedError

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.meeting = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")  # threads run already: no fork
        os.environ.update(_ALLOCATOR)  # read when a process starts: this one's is as it was
        self.pipes, self.workers = [], []
        self.processor: list[float] = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            store = Path(self.meeting.name, "store")
            arguments = (theirs, rank, store, type(self), task.name, task.chunks)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()  # so that a worker's death is an EOFError here
            self.pipes.append(ours)
            self.workers.append(worker)

    def _ask(self, command: str) -> list[Any]:
        """Return both answers.

        Raises:
            ProcessesFailedError: what the first process reported that failed, or that there was no
                answer in time. The other one may wait for it for as long as its group does, and is
                not waited for here.
        """
        answers: dict[int, Any] = {}
        ends = time.monotonic() + self.patience
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has ended: what it left is read below
                pipe.send(command)
        while len(answers) < len(self.pipes):
            left = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(left, timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                ranks = [str(self.pipes.index(pipe)) for pipe in left]
                seconds = f"{self.patience:.0f} s"
                raise ProcessesFailedError(
                    self, f"no answer to {command!r} from rank {' and '.join(ranks)} for {seconds}"
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            answer = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.workers[rank].join(1)
            code = self.workers[rank].exitcode
            raise ProcessesFailedError(self, f"rank {rank} ended, exit code {code}") from None
        if isinstance(answer, _Failure):
            raise ProcessesFailedError(self, f"rank {rank} failed: {answer.text}")
        return answer

    def step(self) -> Seconds:
        answers = self._ask("step")
        self.loss = next(answer.loss for answer in answers if answer.loss is not None)
        self.processor.append(sum(answer.processor for answer in answers))
        return Seconds(max(a.ended for a in answers) - min(a.begun for a in answers))

    def gradients(self) -> list[Tensor]:
        return [g for blob in self._ask("gradients") for g in torch.load(io.BytesIO(blob))]

    def close(self) -> None:
        """End the processes, also those that wait for one that has failed."""
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(_GOODBYE)
            worker.kill()
            worker.join()
        self.meeting.cleanup()


class TorchPipelining(Processes):
    """Stages that are written by hand."""

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Step, list[Tensor]]:
        model, x, y = workload.sample(chunks)  # the parent's, made again: the seed is fixed
        module = Separate(model[rank])
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        return _one_f_one_b(stage, workload, x, y, chunks), list(module.parameters())


class TorchTracer(Processes):
    """Stages that ``torch.distributed.pipelining.pipeline`` makes from a trace of the model.

    It has no patch as :class:`Separate` has one, and with torch 2.15 it runs the U-Net without. A
    model that it cannot trace is left out, with the error.
    """

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Step, list[Tensor]]:
        model, x, y = workload.sample(chunks)
        traced = pipeline(model, (x[: workload.rows],), split_spec={"1": SplitPoint.BEGINNING})
        stage = traced.build_stage(rank, torch.device("cpu"))
        own = dict(traced.get_stage_module(rank).named_parameters())
        parameters = [own[name] for name, _ in model.named_parameters() if name in own]
        return _one_f_one_b(stage, workload, x, y, chunks), parameters


class BlockpipeProcesses(Processes):
    """Blockpipe's stages, and its step around torch's schedule."""

    @staticmethod
    def make(workload: Workload, chunks: int, rank: int) -> tuple[Step, list[Tensor]]:
        model, x, y = workload.sample(chunks)
        bp.begin_blocks(model, {"1": 1})
        pipe = DistributedPipeline(model, sample=x, chunks=chunks, schedule="1f1b")
        own = dict(pipe.named_parameters())
        parameters = [own[name] for name, _ in model.named_parameters() if name in own]

        def step() -> Tensor:
            return pipe.forward_backward(x, target=y, loss_fn=workload.loss).loss

        return step, parameters


def _one_f_one_b(stage: Any, workload: Workload, x: Tensor, y: Tensor, chunks: int) -> Step:
    schedule = Schedule1F1B(
        stage,
        chunks,
        loss_fn=lambda output, target: workload.loss(output, target) / chunks,
        scale_grads=False,  # the loss is weighted already, as in the plain loop
    )

    def step() -> Tensor | None:
        if stage.is_first:
            schedule.step(x, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=y, losses=losses, return_outputs=False)
        return torch.stack(losses).sum()

    return step


@dataclass(frozen=True)
class _Failure:
    """Why a worker cannot go on."""

    text: str


@dataclass(frozen=True)
class _Done:
    """A process's part of a step: the moments at which it began and ended, in seconds of one clock
    for both processes, the processor's seconds, and the loss where it is known."""

    begun: float
    ended: float
    processor: float
    loss: float | None


def _work(
    pipe: Connection, rank: int, store: Path, kind: type[Processes], name: str, chunks: int
) -> None:
    """A worker's life, until the parent closes the pipe, or until it fails."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=60),  # one that fails is not waited for longer
        )
        do_step, parameters = kind.make(WORKLOADS[name], chunks, rank)
        with contextlib.suppress(EOFError):
            while True:
                if pipe.recv() == "gradients":
                    blob = io.BytesIO()
                    torch.save(gradients_of(parameters), blob)
                    pipe.send(blob.getvalue())
                    continue
                dist.barrier()
                processor, begun = time.process_time(), time.perf_counter()
                loss = do_step()
                ended, processor = time.perf_counter(), time.process_time() - processor
                pipe.send(_Done(begun, ended, processor, None if loss is None else loss.item()))
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(OSError):  # the other one's failure was heard before, and all ends
            pipe.send(_Failure("".join(traceback.format_exception_only(error)).strip()))
