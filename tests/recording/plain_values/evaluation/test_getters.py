"""Values that functions of Python read by their names, on another stage than the one that sets them."""

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ....stage_devices import stages

Reads = Callable[["Net"], float]


class State:
    def __init__(self) -> None:
        self.scale, self.table = 1.0, {"scale": 1.0}


class Net(nn.Module):
    """Its first stage sets numbers of the data, and its second one reads them."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.state, self.reads = State(), reads
        self.read = functools.partial(getattr, self.state, "scale")
        self.look_up = functools.partial(operator.getitem, self.state.table, "scale")
        self.states = [self.state]

    def put(self, h: Tensor) -> None:
        self.state.scale = h.detach().abs().max().item()
        table = kept()
        table.update(scale=self.state.scale)
        self.state.table["scale"] = self.state.scale

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.put(h)
        with bp.Block(stage=1):
            return self.b(h) * self.reads(self)


class Hooked(Net):
    """A backward reads them."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.put(h)
            h.register_hook(lambda gradient: gradient * self.reads(self))
        with bp.Block(stage=1):
            return self.b(h)


@functools.cache
def kept() -> dict[str, float]:
    return {"scale": 1.0}


def _along_a_path(net: Net) -> float:
    return functools.reduce(getattr, ["state", "scale"], net)


def _by_a_getter(net: Net) -> float:
    return operator.attrgetter("state.scale")(net)


def _of_what_a_getter_gives(net: Net) -> float:
    return operator.attrgetter("state.table")(net)["scale"]


def _by_a_partial(net: Net) -> float:
    return net.read()


def _of_each(net: Net) -> float:
    return sum(map(operator.attrgetter("scale"), net.states))


def _by_order(net: Net) -> float:
    first, *_ = sorted([*net.states, State()], key=operator.attrgetter("scale"))
    return 2.0 if first is net.state else 1.0


def _of_a_call(net: Net) -> float:
    return sum(kept().values())


def _by_an_entry(net: Net) -> float:
    return net.look_up()


def _by_a_text(net: Net) -> float:
    return float("{:>{width}} {net.scale}".format("", width=1, net=net.state))


def _by_a_text_along_a_path(net: Net) -> float:
    return float(f"{net.state.table['scale']}")


READS = [_along_a_path, _by_a_getter, _by_a_partial, _of_each, _by_a_text, _by_a_text_along_a_path]
ONCE = [_of_what_a_getter_gives, _by_order, _of_a_call, _by_an_entry]


@pytest.mark.parametrize(
    ("kind", "reads"), [*((Net, one) for one in [*READS, *ONCE]), *((Hooked, one) for one in READS)]
)
def test_a_value_when_pythons_function_reads_it_on_another_stage_is_refused(kind, reads) -> None:
    net, x = kind(reads), torch.randn(4, 4)
    kept.cache_clear()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the forward changes .* and reads it"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def _of_others(net: Net) -> float:
    other, third = State(), State()
    rank = max([other, third], key=operator.attrgetter("scale")).scale
    return rank * functools.reduce(getattr, ["scale"], other) + len(kept())


def test_values_when_pythons_functions_read_others_of_the_names_are_fine() -> None:
    net = Net(_of_others)
    del net.look_up
    net.put = lambda h: setattr(net.state, "scale", h.detach().max().item())
    bp.Pipeline(net, devices=stages(2), chunks=2)(torch.randn(4, 4))
