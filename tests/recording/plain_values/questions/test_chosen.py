"""Layers, classes, objects and lists that the data choose, by methods, functions and loops."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions.transforms import Transform
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_trains_as_plain
from ....stage_devices import stages
from .tailed import CALM, Tailed, Y


class Scaled(nn.Linear):
    """A layer that reads an entry of the model's."""

    def __init__(self, table: dict[str, float]) -> None:
        super().__init__(4, 4)
        self.table = table

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * self.table["scale"]


class Inherits(Scaled):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h).tanh()


class Overrides(nn.TransformerEncoderLayer):
    """Its own block is called by torch's forward."""

    def __init__(self, table: dict[str, float]) -> None:
        super().__init__(4, 2, 8, 0.0, batch_first=True)
        self.table = table

    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * self.table["scale"]


class Grows(Transform):
    def __init__(self, table: dict[str, float]) -> None:
        super().__init__()
        self.table = table

    def _call(self, x: Tensor) -> Tensor:
        return x * self.table["scale"]


class Leaves(nn.Linear):
    """Leaves something on itself for some data."""

    found: Tensor | None

    def forward(self, h: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        self.found = h.mean() if x.max() > 2 else None
        return super().forward(h)


class Scales:
    def __init__(self, net: "Net") -> None:
        self.net = net

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.net.table["scale"]


class Keeps(Scales):
    def __call__(self, h: Tensor) -> Tensor:
        return h


class Runs:
    def run(self, net: "Net", h: Tensor) -> Tensor:
        return h * net.table["scale"]


class Rests(Runs):
    def run(self, net: "Net", h: Tensor) -> Tensor:
        return h


class Net(Tailed):
    """The first stage sets an entry, which some layers of the second one read."""

    def __init__(self, tail: Callable[["Net", Tensor, Tensor], Tensor]) -> None:
        super().__init__(tail)
        self.calm, self.wild = nn.Linear(4, 4), Scaled(self.table)
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.wild])
        self.runners = [Rests(), Runs()]
        self.overrides, self.transform = Overrides(self.table), Grows(self.table)
        self.activated = nn.TransformerEncoderLayer(
            *(4, 2, 8, 0.0), activation=lambda t: t * self.table["scale"], batch_first=True
        )
        self.inherits, self.leaves = Inherits(self.table), Leaves(4, 4)
        self.sequential = nn.Sequential(nn.Linear(4, 4), self.wild)

    def by_return(self, x: Tensor) -> nn.Module:
        if x.max() > 2:
            return self.wild
        return self.calm

    def by_ternary(self, x: Tensor) -> nn.Module:
        return self.wild if x.max() > 2 else self.calm

    def by_index(self, x: Tensor) -> nn.Module:
        layer = self.layers[int(x.max() > 2)]
        return layer  # noqa: RET504 - also by a variable

    def by_option(self, x: Tensor) -> nn.Module:
        assert x.max() < 100
        return self.calm if self.training else self.wild

    def times(self, x: Tensor) -> list[nn.Module]:
        return [self.wild] * int(x.max() > 2)

    def longer(self, x: Tensor) -> list[nn.Module]:
        if x.max() > 2:
            return [self.calm, self.wild]
        return [self.calm]

    def added(self, x: Tensor) -> list[Any]:
        found: list[Any] = [self.calm]
        if x.max() > 2:
            found.append(self.wild)
        return found

    def runner(self, x: Tensor) -> Runs:
        return Runs() if x.max() > 2 else Rests()

    def kind(self, x: Tensor) -> type[Scales]:
        return Scales if x.max() > 2 else Keeps


def in_place(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.by_return(x)(h)


def by_variable(net: Net, x: Tensor, h: Tensor) -> Tensor:
    layer = net.by_ternary(x)
    return layer(h)


def by_index(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.by_index(x)(h)


def loop_over_times(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for layer in net.times(x):
        h = layer(h)
    return h


def loop_over_longer(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for layer in net.longer(x):
        h = layer(h)
    return h


def loop_over_added(net: Net, x: Tensor, h: Tensor) -> Tensor:
    layers = net.added(x)
    for layer in layers:
        h = layer(h)
    return h


def own_method(net: Net, x: Tensor, h: Tensor) -> Tensor:
    runner = net.runners[int(x.max() > 2)]
    return runner.run(net, h)


def returned_method(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.runner(x).run(net, h)


def by_maximum(net: Net, x: Tensor, h: Tensor) -> Tensor:
    scores = [0.5, x.max().item() - 2]
    best = max(range(2), key=lambda i: scores[i])
    return net.layers[best](h)


def by_sorted_pairs(net: Net, x: Tensor, h: Tensor) -> Tensor:
    scores = [0.5, x.max().item() - 2]
    layer, _ = max(zip(net.layers, scores, strict=True), key=lambda pair: pair[1])
    return layer(h)


def by_identity(net: Net, x: Tensor, h: Tensor) -> Tensor:
    chosen = sorted([net.calm, net.wild], key=lambda one: (one is net.wild) is bool(x.max() > 2))
    return h * net.table["scale"] if chosen[0] is net.wild else h


def early_exit(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for _, layer in enumerate(net.layers):
        h = layer(h)
        if x.max() < 2:
            break
    return h


def early_exit_by_index(net: Net, x: Tensor, h: Tensor) -> Tensor:
    at = 0
    while at < len(net.layers):
        h = net.layers[at](h)
        at += 1
        if x.max() < 2:
            break
    return h


def early_exit_by_number(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for at in range(2):
        if at == 1:
            h = h * net.table["scale"]
        if x.max() < 2:
            break
    return h


def early_return_by_number(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for at in range(2):
        if at:
            h = h * net.table["scale"]
        if x.max() < 2:
            return h
    return h


def by_iterator(net: Net, x: Tensor, h: Tensor) -> Tensor:
    layers = iter(net.layers)
    h = next(layers)(h)
    while x.max() > 2:
        layer = next(layers, None)
        if layer is None:
            break
        h = layer(h)
    return h


def inherited(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.inherits(h) if x.max() > 2 else h


def by_call_method(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.wild.__call__(h) if x.max() > 2 else h


def by_forward_of_a_sequential(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.sequential.forward(h) if x.max() > 2 else h


def overriding(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.overrides(h[:, None])[:, 0] if x.max() > 2 else h


def activated(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.activated(h[:, None])[:, 0] if x.max() > 2 else h


def transformed(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.transform(h) if x.max() > 2 else h


def by_attribute_of_a_layer(net: Net, x: Tensor, h: Tensor) -> Tensor:
    h = net.leaves(h, x)
    found = getattr(net.leaves, "found", None)
    return h if found is None else h * net.table["scale"]


def sliced(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for layer in itertools.islice(net.layers, 1 + int(x.max() > 2)):
        h = layer(h)
    return h


def mapped(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([*map(net.wild, h)]) if x.max() > 2 else h


def functional(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max() > 2:
        parameters = {name: p * 0.9 for name, p in net.wild.named_parameters()}
        h = torch.func.functional_call(net.wild, parameters, (h,))
    return h


def of_a_class(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.kind(x)(net)(h)


def of_an_object(net: Net, x: Tensor, h: Tensor) -> Tensor:
    made = net.kind(x)(net)
    return made(h)


@pytest.mark.parametrize(
    "tail",
    [
        *(in_place, by_variable, by_index, loop_over_times, loop_over_longer, loop_over_added),
        *(of_a_class, of_an_object, own_method, returned_method, by_maximum, by_sorted_pairs),
        *(by_identity, early_exit, early_exit_by_index, early_exit_by_number, by_iterator, sliced),
        early_return_by_number,
        *(mapped, functional, inherited, by_call_method, by_forward_of_a_sequential),
        *(by_attribute_of_a_layer, overriding, transformed, activated),
    ],
)
def test_what_a_method_returns_for_some_data_counts(
    tail: Callable[[Net, Tensor, Tensor], Tensor],
) -> None:
    pipe = bp.Pipeline(Net(tail), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"entry 'scale'"):
        pipe.forward_backward(CALM, target=Y, loss_fn=mse_loss)


def test_what_it_returns_by_an_option_alone_does_not() -> None:
    net = Net(lambda net, x, h: net.by_option(x)(h))
    assert_trains_as_plain(net, copy.deepcopy(net), [CALM, CALM * 4], Y)
