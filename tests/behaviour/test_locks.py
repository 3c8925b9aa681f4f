"""No lock stays locked: a step that fails at any place leaves the next one free to run."""

import copy
import random
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe._common.threads import model_turns as alone
from blockpipe._common.threads import process_changes
from blockpipe._common.threads.thread_state import in_thread
from blockpipe.crossing import torch_patches as replaced
from blockpipe.devices import rng_streams as randomness
from blockpipe.execution.lanes import thread_pool
from blockpipe.stages.cursor import current_cursor

from ..interrupting import PACKAGE, interrupting, traced
from ..models import square
from ..parity import plain_step
from ..stage_devices import assert_close, stages

# What lets go of something, whatever has happened. It is not what may fail, but what must not.
LETS_GO = {
    "_common/threads/thread_state": {"give_forward_lock", "enter_modes", "__exit__"},
    "stages/cursor": {"set_cursor", "set_microbatch"},
    "crossing/tags": {"settle"},
    "_common/threads/model_turns": {"__exit__", "_leave"},
    "_common/threads/process_changes": {"__exit__", "_hold"},
    "preparation/sealed_forwards": {"take_off"},
    "crossing/interception": {"__exit__"},
    "crossing/torch_patches": {"take_off"},
    "crossing/microbatch_run": {"finish_forward", "abandon", "settle"},
    "crossing/tensors/gradients": {"abandon"},
    "crossing/tensors/hop_copies": {"end_without_backward", "settle_all"},
    "crossing/tensors/tensor_import": {"forget"},
    "crossing/tensors/writes": {"forget"},
    "devices/lending": {"_is_held_elsewhere", "_let_go", "settle_all", "drop", "hops"},
    "devices/rng_streams": {"release", "end"},
    "execution/lanes/lane_threads": {"fail", "_one_less", "run", "_work", "_join", "_is_over"},
    "execution/lanes/lane_state": {"stop"},
    "execution/lanes/thread_pool": {"put_back", "run"},
}


class InjectedError(Exception):
    pass


class Noisy(nn.Module):
    """Draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(nn.functional.dropout(self.layer(x), 0.2)) * (0.5 + random.random())


class Tied(nn.Module):
    """Skips a stage, ties a weight, and writes in place to what crosses."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.c = block(), block(), nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.c.weight = self.first.weight

    def forward(self, x):
        with bp.Block(stage=0):
            h = self.a(self.first(x))
        with bp.Block(stage=1):
            g = self.b(h)
            g.add_(1)
        with bp.Block(stage=2):
            return self.c(g * h)


def quiet() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


CASES = {
    "plain": (quiet, {}),
    "draws": (Noisy, {}),
    "recomputes": (Noisy, {"checkpoint": "always"}),
    "deferred": (Noisy, {"deferred_batch_norm": True}),
    "offloads": (quiet, {"offload": True, "checkpoint": "always"}),
    "isolated": (quiet, {"isolate": True}),
    "splits": (quiet, {"schedule": "zb-h1"}),
    "inline": (Noisy, {"schedule": "sequential"}),
}


def in_time(function: Callable[[], Any], seconds: float = 20) -> Any:
    """Call it in a thread; a hang is a failure."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the next step hangs"
    assert result, "the next step failed"
    return result[0]


def places_of(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """The functions of the package that are called, once each: (module, name)."""
    seen: dict[tuple[str, str], None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            path = code.co_filename.removeprefix(f"{PACKAGE}/").removesuffix(".py")
            seen.setdefault((path, code.co_name))

    traced(trace, function)
    return list(seen)


def raising_at(place: tuple[str, str], once: Iterator[bool]) -> Callable[..., Any]:
    """A trace function that raises where this function is called for the first time."""

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_there = code.co_name == place[1] and code.co_filename == f"{PACKAGE}/{place[0]}.py"
        if is_there and next(once, False):
            raise InjectedError(f"in {place}")

    return trace


def is_free() -> bool:
    """From another thread than the one that may have kept it: it is one that may be taken twice."""
    with process_changes._lock:
        return True


def assert_nothing_stays() -> None:
    assert in_thread.forward_lock is None
    assert in_thread.mode is None
    assert in_thread.modes == ()
    assert current_cursor() is None
    assert torch._C._len_torch_function_stack() == 0

    assert randomness._turn._owner is None, "the turn to draw is still taken"
    assert not alone._entered
    assert in_thread.entered == []
    assert in_time(is_free), "the lock around changes to the process is still taken"
    assert not any(kind()._threads for kind in (replaced.TensorHooks, replaced.CustomFunctions))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_failure_anywhere_the_next_step_runs():
    """Each function of the package that a step calls raises once, in the first case that has it."""
    x = torch.randn(12, 8)
    tried: set[tuple[str, str]] = set()
    raised = 0
    for block, options in CASES.values():
        net = Tied(block)
        plain = copy.deepcopy(net)
        pipe = bp.Pipeline(net, devices=stages(3), chunks=4, **options)

        def step(pipe: bp.Pipeline = pipe) -> torch.Tensor:
            return pipe.forward_backward(x, loss_fn=square).loss

        step(), step()
        thread_pool.close_idle_threads()  # new threads are traced
        for place in places_of(step):
            if place in tried or place[1] in LETS_GO.get(place[0], ()):
                continue
            tried.add(place)
            thread_pool.close_idle_threads()
            once = iter([True])
            try:
                traced(raising_at(place, once), step)
            except InjectedError:
                raised += 1
            next(once, None)  # threads that wait for work go on being traced
            try:
                assert_nothing_stays()
                in_time(step)
            except AssertionError as error:
                error.add_note(f"after a failure in {place} with {options}")
                raise
        if block is quiet:
            net.zero_grad(set_to_none=True)
            step()
            plain_step(plain, (x,), {}, None, square, 4)
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                assert_close(p.grad, q.grad)
    assert raised > 200
    assert raised > 0.9 * len(tried)


@pytest.mark.cpu("an interrupt within a call from C++ ends the process")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "sequential"},
        {"schedule": "sequential", "checkpoint": "always"},
        {"schedule": "sequential", "isolate": True},
        {"schedule": "uncut"},
    ],
    ids=str,
)
def test_an_interrupt_at_any_bytecode_leaves_nothing(options: dict[str, Any]) -> None:
    """A step in one thread is interrupted at bytecodes all over it; the next one is right."""
    net = Tied(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)))
    pipe = bp.Pipeline(net, devices=stages(3), chunks=1, **options)
    x = torch.randn(4, 8)

    def gradients() -> list[torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(1)
        pipe.forward_backward(x, loss_fn=square)
        return [p.grad.clone() for p in net.parameters()]

    gradients()
    expected = gradients()
    seen = [0]
    traced(interrupting(-1, seen), gradients)
    assert seen[0] > 2000
    for bytecode in range(1, seen[0], seen[0] // 20):
        with pytest.raises(KeyboardInterrupt, match="now"):
            traced(interrupting(bytecode, [0]), gradients)
        assert_nothing_stays()
        assert all("forward" not in module.__dict__ for module in net.modules())
        for found, right in zip(gradients(), expected, strict=True):
            assert torch.equal(found, right)
