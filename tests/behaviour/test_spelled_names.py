"""Names and keys that code spells in another way than the code that sets what they name."""

import copy
import enum
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.arange(32.0).view(8, 4) / 32


class Key(enum.Enum):
    """Names of statistics."""

    SCALE = "scale"
    OTHER = "other"


class Scale(nn.Linear):
    """Its statistics are under the name of its class."""


class Kept:
    """An object with a statistic, which also takes ``get_scale`` for its name."""

    def __init__(self) -> None:
        self.scale = self.other = 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return getattr(self, name[4:])
        raise AttributeError(name)


class Spelled(nn.Module):
    """The first stage sets a statistic, which code reads by a name that is spelled otherwise."""

    def __init__(self, read: Callable[["Spelled"], float], *, reads_own: bool = False) -> None:
        super().__init__()
        self.a, self.b = Scale(4, 4), nn.Linear(4, 4)
        self.read, self.reads_own, self.long = read, reads_own, "layer_scale"
        self.table = {"scale": 1.0, "other": 1.0, "SCALE": 1.0, "Scale": 1.0}
        self.kept = Kept()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.table["scale"] = self.kept.scale = 1 + h.abs().mean().item()
            self.table["SCALE"] = self.table["Scale"] = self.kept.scale
            if self.reads_own:
                h = h * self.read(self)
        with bp.Block(stage=1):
            time.sleep(0.002)
            h = self.b(h)
            return h if self.reads_own else h * self.read(self)


SPELLED = [
    lambda net: net.table[Key.SCALE.value],
    lambda net: net.table[Key["SCALE"].value],
    lambda net: net.table[Key.SCALE.name],
    lambda net: net.table[type(net.a).__name__],
    lambda net: net.table[net.a.__class__.__qualname__],
    lambda net: net.table[net.long[6:]],
    lambda net: getattr(net.kept, net.long[6:]),
    lambda net: getattr(net.kept, Key.SCALE.value),
    lambda net: getattr(net.kept, next(key.value for key in Key)),
    lambda net: getattr(net.kept, re.sub("layer_", "", net.long)),
    lambda net: {key.value: getattr(net.kept, key.value) for key in Key}["scale"],
    lambda net: net.kept.get_scale,
]


@pytest.mark.parametrize("read", SPELLED)
def test_a_name_that_is_spelled_otherwise_is_the_same_name(
    read: Callable[[Spelled], float],
) -> None:
    """An enum's value and a class's name stood for the descriptors that give them, and a part of
    a text for nothing."""
    pipe = bp.Pipeline(Spelled(read), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="scale|SCALE|Scale"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize(
    "read",
    [
        *(lambda net: net.table[Key.OTHER.value], lambda net: getattr(net.kept, Key.OTHER.value)),
        *(lambda net: net.table["another"[2:]], lambda net: getattr(net.kept, "another"[2:])),
    ],
)
def test_another_name_that_is_spelled_otherwise_is_another_name(
    read: Callable[[Spelled], float],
) -> None:
    pipe = bp.Pipeline(Spelled(read), devices=stages(2), chunks=4)
    assert pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss.isfinite()


@pytest.mark.parametrize("read", SPELLED)
def test_a_stage_may_read_its_own_by_any_spelling(read: Callable[[Spelled], float]) -> None:
    net = Spelled(read, reads_own=True)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(3):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        plain_step(plain, (X.to(DEVICE),), {}, X.to(DEVICE), mse_loss, 4)
    assert_same_gradients(net, plain)


class Base(nn.Module):
    count = 0


class ReadsBase(Base):
    """Its first stage counts in its class, whose count the second one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            Base.count += 1
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) * super().count


class Imports(ReadsBase):
    """The same of a variable of a module."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            sys.modules[__name__].COUNT += 1
            h = self.a(x)
        with bp.Block(stage=1):
            from .test_spelled_names import COUNT

            return self.b(h) * COUNT


COUNT = 0


@pytest.mark.parametrize(("kind", "name"), [(ReadsBase, "Base.count"), (Imports, "COUNT")])
def test_what_super_or_an_import_in_a_function_reads_is_found(kind: Any, name: str) -> None:
    """Attack 40: neither was seen."""
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=name):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert Base.count == COUNT == 0


class Around(nn.Module):
    """A wrapper that gives what is inside of it, by torch's own words."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)  # type: ignore[no-any-return]


class Leaves(nn.Linear):
    """Leaves a number under a name that tensors have as well."""

    norm = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.norm = h.norm().item()
        return h


def test_what_a_wrapper_gives_of_what_is_inside_of_it_is_that_ones() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Around(Leaves(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h) / self.a.norm

    pipe = bp.Pipeline(Wrapped(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"a\.base\.norm"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
