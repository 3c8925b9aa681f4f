"""Attributes whose names the data choose, of what no class tells of while a step runs."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Gain:
    calm = wild = 1.0


class Counted:
    """Both stages count in it."""

    def __init__(self) -> None:
        self.calm = self.wild = 1.0
        self.calls = 0


def _function() -> None:
    pass


def _owner(kind: str) -> Any:
    owner = {
        "class": lambda: type("Own", (Gain,), {"calm": 1.0, "wild": 1.0, "__module__": __name__}),
        "function": lambda: types.FunctionType(_function.__code__, globals()),
        "module": lambda: types.ModuleType("settings"),
        "counted object": Counted,
    }[kind]()
    owner.calm = owner.wild = 1.0
    return owner


class Named(nn.Module):
    """One stage sets an attribute by its name, and the other one reads the one of a name that a
    method tells; or the reverse."""

    def __init__(self, owner: Any, reads: bool) -> None:
        super().__init__()
        self.a, self.b, self.owner, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), [owner], reads

    def name(self, x: Tensor) -> str:
        return ["calm", "wild"][int(x.max() > 50)]

    def forward(self, x: Tensor) -> Tensor:
        owner, name = self.owner[0], self.name(x)
        with bp.Block(stage=0):
            h = self.a(x)
            if isinstance(owner, Counted):
                owner.calls += 1
            value = float(h.detach().mean())
            if self.reads:
                owner.wild = value
            else:
                setattr(owner, name, value)
        with bp.Block(stage=1):
            if isinstance(owner, Counted):
                owner.calls += 1
            return self.b(h) * (getattr(owner, name) if self.reads else owner.wild)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "set"])
@pytest.mark.parametrize("kind", ["class", "function", "module", "counted object"])
def test_a_name_that_data_choose_may_be_any(kind: str, reads: bool):
    """No other code runs, and nothing told of it."""
    net = Named(_owner(kind), reads)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError):  # noqa: PT012 - at once, or when the data choose it
        for step in range(3):
            x = torch.randn(8, 4)
            x[4] += 100 * (step == 2)
            pipe.forward_backward(x, target=x, loss_fn=mse_loss)
