"""Models and helpers of several test files."""

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.execution.lanes.thread_pool import idle_threads

from ..stage_devices import assert_close, equal, stages

STAGES, CHUNKS, ROWS = 3, 4, 8
_OF_THE_TEST = "PYTEST_CURRENT_TEST"


class Bomb:
    """Raises at one (place, stage, micro-batch) while it is armed.

    Where it is armed is in an event, which is no plain value: that would be a reason to record anew,
    and the failing step would always be the first one, in which stages take turns.
    """

    def __init__(self) -> None:
        self._armed: Any = threading.Event()
        self.disarm()
        self.visits: list[tuple[str, int, int]] = []
        self.before: Callable[[], None] = lambda: None

    def arm(self, place: str, stage: int, microbatch: int, error: type[BaseException]) -> None:
        self._armed.at, self._armed.error = (place, stage, microbatch), error

    def disarm(self) -> None:
        self._armed.at = None

    def visit(self, place: str, stage: int, microbatch: int | None) -> None:
        if microbatch is None:
            return
        self.visits.append((place, stage, microbatch))
        if (place, stage, microbatch) == self._armed.at:
            self.before()
            raise self._armed.error("boom")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.visit("loss", STAGES - 1, bp.current_microbatch())
        return F.mse_loss(output, target)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bomb":
        return Bomb()  # a plain copy's own, never armed


class Fuse(torch.autograd.Function):
    """The identity, whose backward visits the bomb."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb, place: str, stage: int) -> Tensor:
        ctx.bomb, ctx.place, ctx.stage = bomb, place, stage
        ctx.microbatch = bp.current_microbatch()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.bomb.visit(ctx.place, ctx.stage, ctx.microbatch)
        return gradient, None, None, None


class Layer(nn.Module):
    """One stage's module: it may fail in forward, in a custom backward, in a tensor hook."""

    def __init__(self, bomb: Bomb, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bomb, self.stage = bomb, stage

    def forward(self, x: Tensor) -> Tensor:
        bomb, stage, m = self.bomb, self.stage, bp.current_microbatch()
        bomb.visit("module", stage, m)
        x = torch.tanh(self.linear(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: bomb.visit("module hook", stage, m))
        return Fuse.apply(x, bomb, "module backward", stage)


class Net(nn.Module):
    """Three stages, with places to fail in the glue too."""

    def __init__(self, bomb: Bomb) -> None:
        super().__init__()
        self.bomb = bomb
        self.layers = nn.ModuleList(Layer(bomb, stage) for stage in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                x = layer(x)
                m = bp.current_microbatch()
                self.bomb.visit("glue", stage, m)
                x = Fuse.apply(x, self.bomb, "glue backward", stage)
                if x.requires_grad:
                    x.register_hook(
                        lambda g, stage=stage, m=m: self.bomb.visit("glue hook", stage, m)
                    )
        return x


def make(schedule: str, **options: Any) -> tuple[Bomb, Net, nn.Module, bp.Pipeline]:
    """An armed-able net, its plain copy, and a pipeline that has been recorded and placed."""
    torch.manual_seed(0)
    bomb = Bomb()
    net = Net(bomb)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(
        net,
        devices=stages(STAGES),
        chunks=CHUNKS,
        schedule=schedule,
        sample=((torch.zeros(ROWS, 4),), {}),
        **options,
    )
    return bomb, net, plain, pipe


class Kept:
    """A net with its pipeline for each schedule, which many tests use one after another: each of
    them shows that it recovers, and a recording takes longer than the steps."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Bomb, Net, nn.Module, bp.Pipeline]] = {}

    @contextmanager
    def made(self, schedule: str) -> Iterator[tuple[Bomb, Net, nn.Module, bp.Pipeline]]:
        """Yield the one of a schedule; one whose test failed is not used again."""
        found = self._made.pop(schedule, None) or make(schedule)
        name = os.environ.pop(_OF_THE_TEST)  # which pytest sets anew: a reason to record anew
        try:
            yield found
        finally:
            os.environ[_OF_THE_TEST] = name
        self._made[schedule] = found


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 4, generator=generator)


def step(pipe: bp.Pipeline, bomb: Bomb, how: str) -> None:
    x, y = batch()
    if how == "forward_backward":
        pipe.forward_backward(x, target=y, loss_fn=bomb.loss)
    else:
        F.mse_loss(pipe(x), y.to(pipe.output_device)).backward()


def busy_threads() -> int:
    """Our threads that are not idle, once those that have just finished are back in the pool.

    A thread goes back to the pool right after the step it worked for has returned.
    """
    deadline = time.monotonic() + 5
    while True:
        alive = sum(t.name == "blockpipe" for t in threading.enumerate())
        busy = alive - idle_threads()
        if busy == 0 or time.monotonic() > deadline:
            return busy
        os.sched_yield()


def assert_recovers(net: nn.Module, plain: nn.Module, pipe: bp.Pipeline, bomb: Bomb) -> None:
    """Nothing of ours is left, and the next call gives the plain loop's gradients."""
    for name, module in net.named_modules():
        assert "forward" not in module.__dict__, name
    assert torch.autograd.Function.apply.__module__ != "blockpipe.glue"
    assert busy_threads() == 0
    assert bp.current_stage() is None
    assert bp.current_microbatch() is None
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    bomb.disarm()
    for how in ("forward_backward", "call"):
        net.zero_grad()
        plain.zero_grad()
        x, y = batch()
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            (F.mse_loss(plain(part), target) / CHUNKS).backward()
        step(pipe, bomb, how)
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            if how == "forward_backward":
                assert equal(p.grad, q.grad), name
            assert_close(p.grad, q.grad, msg=name)
    assert busy_threads() == 0


def catch(error: type[BaseException], function: Callable[[], Any]) -> BaseException:
    """The exception, for what ``pytest.raises`` cannot keep from ending the test run."""
    with pytest.raises(error, match="boom") as caught:
        function()
    return caught.value
