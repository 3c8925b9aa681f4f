"""Objects that a cache keeps from the first forward on, or a library's object holds, are shared too."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages


class Entry:
    """What a cache keeps."""

    def __init__(self) -> None:
        self.scale, self.numbers, self.table = 1.0, np.ones(1), {"scale": 1.0}


@functools.lru_cache
def kept(name: str) -> Entry:
    return Entry()


@functools.cache
def positions(size: int) -> list[float]:
    return [i / size for i in range(size)]


class Net(nn.Module):
    """Two layers on two stages; the first one leaves a number of the data in what a cache keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def leave(self, value: float) -> None: ...

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.leave(h.detach().abs().max().item())
        with bp.Block(stage=1):
            return self.b(h) * self.factor()


class Attribute(Net):
    def leave(self, value: float) -> None:
        entry = kept("x")
        entry.scale = value

    def factor(self) -> float:
        entry = kept("x")
        return entry.scale


class InsideOfIt(Net):
    def leave(self, value: float) -> None:
        entry = kept("x")
        entry.table["scale"] = value

    def factor(self) -> float:
        entry = kept("x")
        return entry.table["scale"]


class Array(Net):
    def leave(self, value: float) -> None:
        numbers = kept("x").numbers
        numbers[0] = value

    def factor(self) -> float:
        numbers = kept("x").numbers
        return float(numbers[0])


class Settings(Net):
    """The dictionaries in an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), 1.0)

    def leave(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group.update(lr=value)

    def factor(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


class ReadsTable(Net):
    """It sets nothing in the list that the cache keeps."""

    def factor(self) -> float:
        table = positions(3)
        return table[-1]


@pytest.mark.parametrize("kind", [Attribute, InsideOfIt, Array, Settings])
def test_an_object_when_a_cache_or_a_library_holds_it_then_it_is_shared(kind) -> None:
    """A number that one stage sets in it and another one reads is found."""
    kept.cache_clear()
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the forward changes .* and reads it on hops \[1\]"):
        pipe(torch.randn(4, 4))


def test_a_cached_table_when_the_first_forward_makes_it_then_any_stage_reads_it() -> None:
    """Nothing is refused, and the numbers are the plain loop's."""
    net, x, target = ReadsTable(), torch.randn(4, 4), torch.zeros(4, 4)
    plain = copy.deepcopy(net)
    plain_step(plain, (x,), {}, target, mse_loss, 2)
    positions.cache_clear()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(x, target=target, loss_fn=mse_loss)
    assert_same_gradients(net, plain)
