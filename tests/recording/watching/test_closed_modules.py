"""Other threads' calls of a model that is recorded."""

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe._common.threads import standstill
from blockpipe.recording.watching import closed_modules


class Held:
    """What a caller's frame holds."""


@pytest.mark.parametrize(
    "looks", [lambda: closed_modules._places_of_calls(set()), standstill._is_debugged]
)
def test_who_looks_at_all_threads_keeps_no_frame(
    looks: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own frame is one of them, and behind it is all that a step holds. Python says in no order
    which thread is the last."""
    frames = sys._current_frames

    def own_comes_last() -> dict[int, object]:
        found = frames()
        return found | {threading.get_ident(): found.pop(threading.get_ident())}

    monkeypatch.setattr(sys, "_current_frames", own_comes_last)
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    gc.collect()
    gc.disable()
    try:

        def step() -> weakref.ref[Held]:
            held = Held()
            looks()
            return weakref.ref(held)

        assert step()() is None
    finally:
        gc.enable()
        over.set()
        other.join()


class Waits(nn.Module):
    """Says where it is when it is recorded, and gives the other thread time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.is_inside = threading.Event()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Waits":
        new = Waits()
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.is_inside.set()
            threading.Event().wait(0.02)
            return self.b(h)


def _loads(net: nn.Module) -> list[Tensor]:
    net.load_state_dict({name: torch.ones_like(t) for name, t in net.state_dict().items()})
    return [*net.state_dict().values()]


READS: list[Callable[[nn.Module], list[Tensor]]] = [
    lambda net: [*net.state_dict().values()],
    lambda net: [*net.parameters()],
    lambda net: [*net.buffers()],
    lambda net: [*copy.deepcopy(net).state_dict().values()],
    _loads,
]


@pytest.mark.parametrize("read", READS)
def test_another_thread_reads_the_models_own_tensors(
    read: Callable[[nn.Module], list[Tensor]],
) -> None:
    """A thread that saves checkpoints, or an actor that takes the learner's weights."""
    net, found = Waits(), list[Tensor]()
    expected = read(copy.deepcopy(net))

    def other() -> None:
        net.is_inside.wait()
        found.extend(read(net))

    thread = threading.Thread(target=other)
    thread.start()
    bp.record(net, torch.ones(4, 4))
    thread.join()
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(type(one) in (Tensor, nn.Parameter) for one in found)
