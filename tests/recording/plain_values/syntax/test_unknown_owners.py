"""Reads of objects that a forward picks out of others, without a name for them."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ....stage_devices import stages

Reads = Callable[["Net", Tensor], Tensor]


class Layer(nn.Linear):
    last = 1.0


class Result(NamedTuple):
    values: Tensor
    last: float


class Results(nn.Linear):
    """Its result has an attribute of the name that the first layer's number has."""

    def forward(self, x: Tensor) -> Result:
        return Result(super().forward(x), 2.0)


class Net(nn.Module):
    """Its first stage leaves a number of the data in its layer."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(4, 4), nn.Linear(4, 4), Results(4, 4)
        self.layers, self.reads = nn.ModuleList([self.a, self.b]), reads

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.a.last = h.detach().abs().max().item()
        with bp.Block(stage=1):
            return self.c(self.b(self.reads(self, h))).values


def _of_the_first_child(net: Net, h: Tensor) -> Tensor:
    return h * next(net.children()).last


def _of_a_named_module(net: Net, h: Tensor) -> Tensor:
    return h * dict(net.named_modules())["a"].last


def _of_the_first_that_is_one(net: Net, h: Tensor) -> Tensor:
    return h * next(m for m in net.modules() if isinstance(m, Layer)).last


def _of_a_list(net: Net, h: Tensor) -> Tensor:
    return h * [m for m in net.layers if isinstance(m, Layer)][-1].last


def _of_a_table(net: Net, h: Tensor) -> Tensor:
    return h * {type(m): m for m in net.layers}[Layer].last


def _of_the_largest(net: Net, h: Tensor) -> Tensor:
    return h * max(net.layers, key=lambda m: isinstance(m, Layer)).last


def _without_properties(net: Net, h: Tensor) -> Tensor:
    return h * inspect.getattr_static(net.a, "last")


@pytest.mark.parametrize(
    "reads",
    [
        _of_the_first_child,
        _of_a_named_module,
        _of_the_first_that_is_one,
        _of_a_list,
        _of_a_table,
        _of_the_largest,
        _without_properties,
    ],
)
def test_an_object_when_it_is_picked_out_of_others_then_its_number_is_shared(reads) -> None:
    pipe = bp.Pipeline(Net(reads), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the forward changes a\.last .* and reads it"):
        pipe(torch.randn(4, 4))


def _of_a_result(net: Net, h: Tensor) -> Tensor:
    return h * net.c(h).last


def test_a_result_when_it_has_an_attribute_of_that_name_is_none_of_these() -> None:
    """It is made for its micro-batch."""
    net, x = Net(_of_a_result), torch.randn(4, 4)
    expected = torch.cat([net(half) for half in x.chunk(2)])
    found = bp.Pipeline(net, devices=stages(2), chunks=2)(x)
    torch.testing.assert_close(found.cpu(), expected.cpu())
