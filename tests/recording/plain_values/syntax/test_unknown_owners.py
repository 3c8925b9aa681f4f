"""Reads of objects that a forward picks out of others, without a name for them."""

import collections
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Counted(nn.Linear):
    load = 0.0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counts, self.table = [0.0], {"n": 0.0}


class Pick(nn.Module):
    def forward(self, layers: nn.ModuleList) -> nn.Module:
        return layers[1]


class Ranks:
    @staticmethod
    def of(net: "Late") -> nn.Module:
        return net.layers[1]

    def __call__(self, net: "Late") -> nn.Module:
        return net.layers[1]


class Late(nn.Module):
    """Its second stage leaves numbers of the data in its layer, when the next micro-batch's first
    stage may have read them."""

    def __init__(self, reads: Callable[["Late"], float]) -> None:
        super().__init__()
        first, last = Counted(), Counted()
        self.layers, self.named = nn.ModuleList([first, last]), nn.ModuleDict({"b": last})
        self.few, self.more, self.by_name = [first], [last], {"a": first, "b": last}
        self.pick, self.ranks, self.reads = Pick(), Ranks(), reads
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.layers[0](x) * (1 + self.reads(self))
        with bp.Block(stage=1):
            h = self.layers[1](h)
            self.leave(h.detach().abs().mean().item())
            return h

    def leave(self, value: float) -> None:
        self.last.load = self.last.counts[0] = self.last.table["n"] = value


class LeftToAny(Late):
    """Nobody can tell what it sets, either."""

    def leave(self, value: float) -> None:
        [*self.named.values(), None][0].load = value


def _each(layers: nn.ModuleList) -> Iterator[Any]:
    yield from layers


@functools.lru_cache
def _kept(net: Late, index: int) -> Any:
    return net.layers[index]


def _after(layer: nn.Module) -> int:
    return int(not isinstance(layer, Counted))


LATE: dict[str, Callable[[Any], float]] = {
    "modules": lambda net: [m for m in net.modules() if isinstance(m, Counted)][1].load,
    "values": lambda net: [*net.named.values(), None][0].load,
    "a sum": lambda net: (net.few + net.more)[1].load,
    "a union": lambda net: (net.by_name | {})["b"].load,
    "a copy": lambda net: dict(net.by_name, c=1)["b"].load,
    "an ordered copy": lambda net: collections.OrderedDict(net.by_name)["b"].load,
    "a chain": lambda net: list(itertools.chain(net.few, net.more))[1].load,
    "a getter": lambda net: operator.itemgetter(1)(net.layers).load,
    "a lambda": lambda net: (lambda: net.layers[1])().load,
    "a generator": lambda net: next(itertools.islice(_each(net.layers), 1, 2)).load,
    "a cache": lambda net: _kept(net, 1).load + _kept(net, 0).load,
    "a module": lambda net: net.pick(net.layers).load,
    "a static method": lambda net: Ranks.of(net).load,
    "a call": lambda net: net.ranks(net).load,
    "the last": lambda net: next(reversed(net.by_name.values())).load,
    "the largest": lambda net: max(net.layers, key=net.more.count).load,
    "sorted": lambda net: sorted(net.layers, key=net.few.count)[0].load,
    "getattr": lambda net: getattr((net.few + net.more)[1], "load"),  # noqa: B009
    "a list in it": lambda net: (net.few + net.more)[1].counts[0],
    "a table in it": lambda net: (net.few + net.more)[1].table.get("n", 0.0),
}


@pytest.mark.parametrize("reads", LATE)
def test_an_object_that_nobody_can_tell_when_it_is_set_later_then_its_number_is_shared(
    reads: str,
) -> None:
    _kept.cache_clear()
    pipe = bp.Pipeline(Late(LATE[reads]), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the forward changes .* and reads it on hops \[0"):
        pipe(torch.randn(4, 4))


def test_an_object_when_what_is_set_is_as_unknown_then_it_is_shared() -> None:
    pipe = bp.Pipeline(LeftToAny(LATE["values"]), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the forward changes layers\.1\.load .* and reads it"):
        pipe(torch.randn(4, 4))


class Found(NamedTuple):
    load: float
    by: dict[str, float]


def _new_objects(net: Late) -> float:
    first, second = Found(1.0, {"n": 2.0}), Found(2.0, {"n": 1.0})
    return max([first, second]).load + sorted([first, second])[0].by["n"]


def _of_a_tensor(net: Late) -> float:
    return torch.linalg.svd(torch.eye(2)).S.sum().item() + "load".count("o")


@pytest.mark.parametrize("reads", [_new_objects, _of_a_tensor])
def test_objects_that_a_forward_makes_when_they_have_such_names_are_none_of_these(reads) -> None:
    net, x = Late(reads), torch.randn(4, 4)
    net.S = 0.0
    expected = torch.cat([net(half) for half in x.chunk(2)])
    found = bp.Pipeline(net, devices=stages(2), chunks=2)(x)
    torch.testing.assert_close(found.cpu(), expected.cpu())
