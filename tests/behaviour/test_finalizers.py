"""Objects that a forward makes and drops, whose end runs code: ``__del__``, callbacks of weak
references, and the end of a generator or a context manager that was left open."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..parity import plain_step
from ..stage_devices import assert_close, stages

HELD: object = None


class Handle:
    live = 0

    def __init__(self) -> None:
        Handle.live += 1

    def __del__(self) -> None:
        Handle.live -= 1


class Thing:
    pass


def _close(*_: object) -> None:
    Handle.live -= 1


def _opened() -> Iterator[None]:
    Handle.live += 1
    try:
        yield
    finally:
        Handle.live -= 1


def by_del(net: nn.Module) -> None:
    net.held = Handle()


def by_a_global(net: nn.Module) -> None:
    global HELD
    HELD = Handle()


def by_finalize(net: nn.Module) -> None:
    net.held = Thing()
    Handle.live += 1
    weakref.finalize(net.held, _close)


def by_a_callback(net: nn.Module) -> None:
    net.held = Thing()
    Handle.live += 1
    net.reference = weakref.ref(net.held, _close)


def by_a_generator(net: nn.Module) -> None:
    net.held = _opened()
    next(net.held)


def by_a_context(net: nn.Module) -> None:
    net.held = contextlib.contextmanager(_opened)()
    net.held.__enter__()


class Net(nn.Module):
    """Two layers; the second one reads how many objects are alive."""

    def __init__(self, open_one: Callable[[nn.Module], None], is_real: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.open_one, self.is_real, self.held = open_one, is_real, None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.open_one(self)
            h = h * (1 + 0.1 * Handle.live)
            if self.is_real and h.sum().item() > 1e9:
                return h
            return self.b(h)


@pytest.fixture(autouse=True)
def _without_collector():
    """What is in a cycle stays until a test collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


WAYS = [by_del, by_a_global, by_finalize, by_a_callback, by_a_generator, by_a_context]


@pytest.mark.parametrize("is_real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verifies", [False, True], ids=["", "verified"])
def test_what_the_end_of_an_object_counts_is_the_plain_loops(way, is_real: bool, verifies: bool):
    """A recording's own objects count nothing, and no step keeps an object of the forward's."""
    global HELD
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    net = Net(way, is_real)
    plain = copy.deepcopy(net)
    seen = []
    for model in (plain, net):
        HELD, Handle.live = None, 0
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
        if model is net and verifies:
            pipe.verify(x, target=y, loss_fn=mse_loss)
            gc.collect()
            assert Handle.live == 0
        for _ in range(3):
            if model is net:
                loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
            else:
                loss = plain_step(plain, (x,), {}, y, mse_loss, 4)
            seen.append((float(loss), Handle.live))
        gc.collect()
        assert Handle.live == 1  # no object of a recording's was left for the collector
        model.held = HELD = None
        assert Handle.live == 0
    assert_close(*(torch.tensor([loss for loss, _ in part]) for part in (seen[:3], seen[3:])))
    assert [live for _, live in seen] == [1] * 6
