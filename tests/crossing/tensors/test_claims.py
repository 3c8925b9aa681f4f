"""Tensors in what a sealed module returns belong to the hop that made them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

import blockpipe as bp

from ...alike import check_trains_alike


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
