"""The code that runs where something is called."""

import functools
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe._common.code import code_of
from blockpipe.errors import StateError

from ..stage_devices import stages


def around(inner: Any) -> Any:
    return lambda *args: inner(*args)


def all_of(inner: list[Any]) -> Any:
    return lambda *args: sum(one(*args) for one in inner)


def scaled(factor: float) -> Any:
    return lambda *args: args[0] * factor


class Hooked(nn.MSELoss):
    """A loss with a hook, if one is given."""

    def __init__(self, hook: Any = None) -> None:
        super().__init__()
        if hook is not None:
            self.register_forward_hook(hook)


def one(*args: Any) -> Any:
    return args[0]


def other(*args: Any) -> Any:
    return args[-1]


SAME = {
    "a number": (scaled(1.0), scaled(2.0)),
    "made anew": (around(one), around(one)),
    "partial": (functools.partial(one, 1), functools.partial(one, 2)),
    "hooked": (Hooked(one), Hooked(one)),
}
OTHER = {
    "around another": (around(one), around(other)),
    "twice": (around(around(one)), around(around(other))),
    "more of them": (all_of([one]), all_of([one, other])),
    "partial": (functools.partial(one), functools.partial(other)),
    "method": (Hooked().forward, nn.L1Loss().forward),
    "hook": (Hooked(), Hooked(one)),
    "another hook": (Hooked(one), Hooked(other)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_anew_has_the_same_code(name: str):
    first, second = SAME[name]
    assert code_of(first) == code_of(second)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_made_around_something_else_has_not(name: str):
    first, second = OTHER[name]
    assert code_of(first) != code_of(second)


class Scales(nn.Module):
    """The first stage sets a number, which losses and hooks read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            self.scale = float(x.detach().abs().mean())
        with bp.Block(stage=1):
            return self.b(x)


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


LOSSES = {
    "wrapped": (around(plain_loss), lambda net: around(lambda o, t: plain_loss(o, t) * net.scale)),
    "terms": (
        all_of([plain_loss]),
        lambda net: all_of([plain_loss, lambda o, t: o.mean() * net.scale]),
    ),
    "hooked": (Hooked(), lambda net: Hooked(lambda m, args, out: out * net.scale)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_looked_at_again_when_it_is_made_around_something_else(name: str):
    """Its own code was the same, and what it read was another micro-batch's number."""
    first, second = LOSSES[name]
    net = Scales()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        pipe.forward_backward(x, target=target, loss_fn=first)
    with pytest.raises(StateError, match="attribute 'scale' of the model"):
        pipe.forward_backward(x, target=target, loss_fn=second(net))


HOOKS = {
    "forward": lambda net, f: net.b.register_forward_hook(lambda m, args, out: f(out)),
    "backward": lambda net, f: net.b.register_full_backward_hook(lambda m, i, o: (f(i[0]),)),
    "parameter": lambda net, f: net.b.weight.register_hook(lambda gradient: f(gradient)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_in_the_place_of_one_of_the_same_code_is_looked_at(name: str):
    net = Scales()
    handle = HOOKS[name](net, lambda t: t * 1)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    handle.remove()
    HOOKS[name](net, lambda t, n=net: t * n.scale)
    with pytest.raises(StateError, match="attribute 'scale' of the model"):
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)


BEFORE = """
from torch import nn
import blockpipe as bp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.k = nn.Linear(4, 4), nn.Linear(4, 4), 0.0
    def forward(self, x):
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)
"""
AFTER = BEFORE.replace(
    "            h = self.a(x)\n",
    "            h = self.a(x)\n            # the largest\n            self.k = float(x.max())\n",
).replace("return self.b(h)", "return self.b(h * (1 + self.k))")


@pytest.mark.parametrize("how", ["code", "method", "class"])
def test_a_file_that_was_edited_and_loaded_again_is_read_again(how: str, tmp_path, monkeypatch):
    """As a notebook's ``%autoreload`` does: the new code was read in the old text."""
    name = f"edited_{how}"
    file = tmp_path / f"{name}.py"
    file.write_text(BEFORE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module(name)
    old, net = module.Net, module.Net()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    file.write_text(AFTER)
    importlib.reload(module)
    if how == "code":
        old.forward.__code__ = module.Net.forward.__code__
    elif how == "method":
        old.forward = module.Net.forward
    else:
        net.__class__ = module.Net
    with pytest.raises(StateError, match="attribute 'k' of the model"):
        pipe.forward_backward(x, loss_fn=torch.sum)
