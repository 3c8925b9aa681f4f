"""What several processes run together where one of them fails: each needs a launch of its own."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe import current_microbatch
from blockpipe.distributed import DistributedPipeline, ReplicatedPipeline

from ..refused_cases import failing

SOON = 60  # seconds in which all have to end


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def _raise() -> None:
    raise ValueError("no luck")


def raises(rank: int, ranks: int) -> None:
    """The failing one has its own error, the others one that quotes it."""
    if rank < ranks - 1:
        failing(
            *(rank, ranks, _raise, f"rank {ranks - 1} failed in a step", "ValueError: no luck"),
            *("failing_cases.py", f"in stage {ranks - 1}, micro-batch 2"),
        )
        return
    try:
        failing(rank, ranks, _raise)
    except ValueError as error:
        assert f"blockpipe: in stage {rank}, micro-batch 2" in error.__notes__
        assert any(f"on rank {rank}" in note for note in error.__notes__)
    else:
        raise AssertionError("it went on")


class _ReadsLater(nn.Linear):
    """Comes to read a weight of another process, to which a list leads."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.calls += 1
        return h * self.others[0].square().mean() if self.calls > 4 else h


def reads_what_another_process_has(rank: int, ranks: int) -> None:
    """It would have the value of the beginning, and give no gradient."""
    net = nn.Sequential(nn.Linear(6, 6), _ReadsLater(6, 6))
    net[1].others, net[1].calls = [net[0].weight], 0
    x = torch.randn(8, 6)
    pipe = DistributedPipeline(bp.begin_blocks(net, {"1": 1}), sample=x, chunks=4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    try:
        pipe.forward_backward(x, loss_fn=torch.sum)
    except bp.BlockpipeError as error:
        said = "code that reads '0.weight', whose value is in another process"
        assert said in str(error), str(error)
        assert "failing_cases.py" in str(error), str(error)
    else:
        raise AssertionError("it went on")
    assert type(net[0].weight) is nn.Parameter
    assert torch.isfinite(net[0].weight.sum())


class _FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no luck with gradients")


class _FailingBackwards(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _FailsBackwards.apply(super().forward(x))


def raises_in_a_backward(rank: int, ranks: int) -> None:
    net = nn.Sequential(_FailingBackwards(6, 6), *[nn.Linear(6, 6) for _ in range(ranks - 1)])
    bp.begin_blocks(net, {str(at): at for at in range(ranks)})
    args = (torch.randn(8, 6),)
    pipe = DistributedPipeline(net, sample=args, chunks=4)
    try:
        with soon():
            pipe.forward_backward(*args, loss_fn=torch.sum)
    except (ValueError, RuntimeError) as error:
        assert isinstance(error, ValueError) is (rank == 0)
        text = f"{error} {getattr(error, '__notes__', '')}"
        assert "no luck with gradients" in text, text
        assert "in the backward of stage 0, micro-batch 0" in text, text
    else:
        raise AssertionError("it went on")


def dies(rank: int, ranks: int) -> None:
    """Without a word. All others hear which, also those that wait for another one."""
    with soon():
        failing(
            *(rank, ranks, _kill),
            f"rank {ranks - 1} has ended in a step without a word",
        )


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def first_dies(rank: int, ranks: int) -> None:
    """It is the one that looks after all others."""
    with soon():
        failing(rank, ranks, _kill, "rank 0 has ended in a step without a word", first=True)


def first_dies_with_the_store(rank: int, ranks: int) -> None:
    """Where nobody can leave a word any more."""
    with soon():
        failing(rank, ranks, _kill, "torch's store is gone", first=True)


def _hang() -> None:
    while True:
        time.sleep(0.1)


def hangs(rank: int, ranks: int) -> None:
    """The others are shown where."""
    last = ranks - 1
    with soon():
        failing(
            *(rank, ranks, _hang, "no rank went on for 5 s"),
            f"rank {last} is in the forward of stage {last}, micro-batch 2",
            *("failing_cases.py", "in _hang", "rank 0 waits after"),
            timeout=5,
        )


def stops(rank: int, ranks: int) -> None:
    """It does nothing any more, in any thread, and keeps its connections."""
    failing(rank, ranks, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def leaves(rank: int, ranks: int) -> None:
    """One does fewer steps than the others."""
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(ranks)])
    bp.begin_blocks(net, {str(at): at for at in range(ranks)})
    args = (torch.randn(8, 6),)
    pipe = DistributedPipeline(net, sample=args, chunks=4)
    pipe.forward_backward(*args, loss_fn=torch.sum)
    if rank:
        return
    try:
        with soon():
            pipe.forward_backward(*args, loss_fn=torch.sum)
    except bp.BlockpipeError as error:
        assert "rank 1 takes part no more" in str(error), str(error)
    else:
        raise AssertionError("it went on")


class _Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(2)
        return super().forward(x)


def is_slow(rank: int, ranks: int) -> None:
    """A step may take longer than what one operation may."""
    net = nn.Sequential(
        *[_Slow(6, 6) if at == ranks - 1 else nn.Linear(6, 6) for at in range(ranks)]
    )
    bp.begin_blocks(net, {str(at): at for at in range(ranks)})
    args = (torch.randn(8, 6),)
    pipe = DistributedPipeline(net, sample=args, chunks=4, timeout=6)
    began = time.monotonic()
    pipe.forward_backward(*args, loss_fn=torch.sum)
    assert time.monotonic() - began > 6


def _replicated(
    rank: int, ranks: int, what: Callable[[], None], *expected: str, **options: Any
) -> None:
    """What becomes of a Pipeline in each process, if the last one's second stage fails."""

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if rank == ranks - 1 and type(x) is Tensor and current_microbatch() == 1:
                what()
            return super().forward(x)

    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), Failing(6, 6)), {"1": 1})
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    shared = ReplicatedPipeline(pipe, **options)
    try:
        with soon():
            shared.forward_backward(torch.ones(4, 6), loss_fn=torch.sum)
    except bp.BlockpipeError as error:
        for text in expected:
            assert text in str(error), str(error)
    else:
        raise AssertionError("it went on")


def a_replica_dies(rank: int, ranks: int) -> None:
    """While the other one waits for its gradients."""
    _replicated(rank, ranks, _kill, "rank 1 has ended in a step without a word")


def a_replica_hangs(rank: int, ranks: int) -> None:
    """It is ended, and the other one is told where it was."""
    expected = ["no rank went on for 5 s", "rank 1 is in the forward of stage 1, micro-batch 1"]
    _replicated(rank, ranks, _hang, *expected, "in _hang", timeout=5)
