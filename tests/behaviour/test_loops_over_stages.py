"""Loops that go from stage to stage: an iterator looks into its container when it goes on."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.arange(32.0).view(8, 4) / 32


class Layers(nn.Module):
    """The first stage changes scales; each stage takes its own one out of ``run``."""

    def __init__(self, run: Callable[["Layers"], Iterator[tuple[Any, float]]], step: float) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scales, self.table = [1.0, 1.0, 1.0], {"0": 1.0, "1": 1.0, "2": 1.0}
        self.array, self.run, self.step = numpy.ones(3), run, step

    def first(self, x: Tensor) -> Tensor:
        if self.step != 1.0:
            self.update()
        return self.a(x)

    def update(self) -> None:
        self.scales[2] *= self.step
        self.table["2"] *= self.step
        self.array *= self.step

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            pairs = self.run(self)
        for i, (layer, scale) in enumerate(pairs):
            with bp.Block(stage=i):
                time.sleep(0.002)
                h = layer(h).tanh() * float(scale)
        return h


class InHeader(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        for i, (layer, scale) in enumerate(zip(self.layers, self.scales, strict=True)):
            with bp.Block(stage=i):
                time.sleep(0.002)
                h = layer(h).tanh() * scale
        return h


class ByNext(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            scales = iter(self.scales)
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                time.sleep(0.002)
                h = layer(h).tanh() * next(scales)
        return h


def _generated(net: Layers) -> Iterator[tuple[Any, float]]:
    for layer, scale in zip(net.layers, net.scales, strict=True):
        yield layer, scale * 1.0


def _handed_on(net: Layers) -> Iterator[tuple[Any, float]]:
    yield from zip(net.layers, net.scales, strict=True)


RUNS: dict[str, Callable[[Any], Any]] = {
    "zip": lambda s: zip(s.layers, s.scales, strict=True),
    "generator": _generated,
    "yield from": _handed_on,
    "expression": lambda s: (
        (layer, scale) for layer, scale in zip(s.layers, s.scales, strict=True)
    ),
    "map": lambda s: zip(s.layers, map(float, s.scales), strict=True),
    "chain": lambda s: (
        zip(s.layers, itertools.chain(s.scales[:2], s.scales[2:]), strict=True)
        if s.step == 1.0
        else zip(s.layers, itertools.chain(s.scales), strict=True)
    ),
    "islice": lambda s: zip(s.layers, itertools.islice(s.scales, 3), strict=True),
    "values": lambda s: zip(s.layers, s.table.values(), strict=True),
    "reversed": lambda s: (
        zip(s.layers, reversed([*reversed(s.scales)]), strict=True)
        if s.step == 1.0
        else zip(s.layers, reversed(s.scales), strict=True)
    ),
    "array": lambda s: zip(s.layers, s.array, strict=True),
}
KINDS: dict[str, tuple[type[Layers], Any]] = {
    **{name: (Layers, run) for name, run in RUNS.items()},
    "header": (InHeader, None),
    "next": (ByNext, None),
}


def _step(net: nn.Module, schedule: str = "1f1b") -> Tensor:
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule)
    return pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss


@pytest.mark.parametrize("name", KINDS)
def test_what_a_loop_takes_on_a_later_stage_is_read_there(name: str) -> None:
    kind, run = KINDS[name]
    with pytest.raises(
        StateError, match=r"the forward changes (a list|a dict|entry|an ndarray).* "
    ):
        _step(kind(run, 0.9))


@pytest.mark.parametrize("name", KINDS)
def test_a_loop_over_what_nobody_changes_is_the_plain_one(name: str) -> None:
    kind, run = KINDS[name]
    torch.manual_seed(0)
    expected = plain_step(kind(run, 1.0), (X,), {}, X, mse_loss, 4)
    torch.manual_seed(0)
    assert_close(_step(kind(run, 1.0)), expected)


class OnOneStage(Layers):
    """Takes all of them where they are changed."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.update()
            scales = [float(scale) for _, scale in self.run(self)]
        for i, (layer, scale) in enumerate(zip(self.layers, scales, strict=True)):
            with bp.Block(stage=i):
                time.sleep(0.002)
                h = layer(h).tanh() * scale
        return h


@pytest.mark.parametrize("name", RUNS)
def test_a_list_of_what_a_loop_took_before_is_the_micro_batchs_own(name: str) -> None:
    torch.manual_seed(0)
    expected = plain_step(OnOneStage(RUNS[name], 0.9), (X,), {}, X, mse_loss, 4)
    torch.manual_seed(0)
    assert_close(_step(OnOneStage(RUNS[name], 0.9)), expected)


class Halts(nn.Module):
    """Goes over both stages as often as the data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.limit = nn.Linear(4, 4), nn.Linear(4, 4), torch.tensor(100.0)

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(4):
            with bp.Block(stage=0):
                x = self.a(x).tanh()
            with bp.Block(stage=1):
                x = self.b(x)
            if turn and x.detach().abs().max().item() < self.limit.item():
                break
        return x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_route_that_is_longer_than_the_recorded_one_has_gradients(checkpoint: str) -> None:
    """Attack 40: uncut, it had none at all."""
    net = Halts()
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="uncut", checkpoint=checkpoint)
    for limit in (100.0, 0.0, 0.0, 100.0):
        net.limit, plain.limit = torch.tensor(limit), torch.tensor(limit)
        loss = pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss
        there = X.to(DEVICE)
        assert_close(loss, plain_step(plain, (there,), {}, there, mse_loss, 4))
        assert_same_gradients(net, plain)
