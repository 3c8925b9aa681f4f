"""Tensors in what a sealed module returns belong to the hop that made them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ...alike import check_trains_alike
from ...models import square
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages


@dataclass(slots=True)
class Slots:
    h: Tensor


@dataclass(slots=True, frozen=True)
class FrozenSlots:
    h: Tensor


class Named(NamedTuple):
    h: Tensor


class Plain:
    __slots__ = ("h",)

    def __init__(self, h: Tensor) -> None:
        self.h = h


class Returns(nn.Linear):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(super().forward(x))


class Net(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = Returns(kind), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            out = self.a(x)
        with bp.Block(stage=1):
            return self.b(out.h)


@pytest.mark.parametrize("kind", [Slots, FrozenSlots, Named, Plain])
def test_an_object_without_a_dict_when_a_module_returns_it_crosses(kind: Any) -> None:
    """Of a dataclass with slots, the tensors were taken for tensors from outside."""
    check_trains_alike(Net(kind))


class MadeAtFirst(nn.Module):
    """Makes its second layer in the first forward, on the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            if self.second is None:
                self.second = nn.Linear(h.shape[1], 8, device=h.device)
            return self.second(h)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize("under", [torch.no_grad, torch.enable_grad])
def test_a_layer_that_the_first_forward_makes_is_everybodys(under: Any, schedule: str) -> None:
    """Under ``no_grad`` its weight was refused as another micro-batch's, with a gradient path."""
    net, x = MadeAtFirst(), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    with under():
        pipe(x)
    plain = copy.deepcopy(net).cpu()
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert_close(loss, plain_step(plain, (x,), {}, None, square, 4))
    assert_same_gradients(net, plain)
