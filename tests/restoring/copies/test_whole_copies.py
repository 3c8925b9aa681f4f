"""Deep copies of models whose functions and weak references lead to the model itself."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.replicas import Replicas
from blockpipe.restoring.copies.whole_copies import copied_whole

from ...parity import plain_step
from ...stage_devices import assert_close, stages


class Leads(nn.Module):
    """Has a function that a test gives it, which leads to the model."""

    def __init__(self, prepare: Callable[["Leads"], None]) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 2.0
        self.function: Any = lambda x: x
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.function(self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(h)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * self.a.bias.to(x.device)


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return self.parent().scaled(x)


def _hook(net: Leads) -> None:
    net.a.register_forward_hook(lambda module, args, out: out * net.scale * net.a.weight.mean())


def _forward(net: Leads) -> None:
    layer, before = net.a, net.a.forward
    layer.forward = lambda x: F.linear(before(x), layer.weight)


def _decorated(net: Leads) -> None:
    net.function = torch.enable_grad()(lambda x: net.scaled(x))


def _in_list(net: Leads) -> None:
    net.functions = [(lambda x: net.scaled(x), 1), net.scaled]
    net.function = lambda x: net.functions[0][0](x) + net.functions[1](x)


def _recursive(net: Leads) -> None:
    def function(x: Tensor, depth: int = 2) -> Tensor:
        return function(net.scaled(x), depth - 1) if depth else x

    net.function = function


def _default(net: Leads) -> None:
    def function(x: Tensor, layer: nn.Module = net.a, *, other: nn.Module = net.a) -> Tensor:
        return layer(x) + other(x)

    net.function = function


def _partial(net: Leads) -> None:
    net.function = functools.partial(lambda layer, x: net.scaled(layer(x)), net.a)


def _cached(net: Leads) -> None:
    net.function = lambda x: x * net.cached()
    net.cached = functools.lru_cache(1)(lambda: float(net.scale))


def _child(net: Leads) -> None:
    net.function = Child(net)


def _method(net: Leads) -> None:
    method = weakref.WeakMethod(net.scaled)
    net.function = lambda x: method()(x)


WAYS = {f.__name__[1:]: f for f in (_hook, _forward, _decorated, _in_list, _recursive, _default)}
WAYS |= {f.__name__[1:]: f for f in (_partial, _cached, _child, _method)}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_with_its_own(way: str):
    """Attack 24: hooks and functions of a copy read the original's parameters."""
    net = Leads(WAYS[way])
    copied = copied_whole(net, {})
    x = torch.randn(2, 4)
    expected = net(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.scale = 0.0
    assert_close(copied(x), expected)
    copied(x).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_replicas_train_as_the_plain_loop_does(way: str):
    """Attack 24: from the second step on gradients were others, without a word."""
    device = stages(1)[0]
    torch.manual_seed(0)
    net = Leads(WAYS[way]).to(device)
    torch.manual_seed(0)
    plain = Leads(WAYS[way]).to(device)
    both = Replicas(net, [[device] * 2] * 2, chunks=2)
    for step in range(3):
        if way != "cached":
            net.scale = plain.scale = 1.0 + step
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        loss = both.forward_backward(x, target=y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (x.to(device),), {}, y, mse_loss, 4))
        with torch.no_grad():
            for ours, its in zip(net.parameters(), plain.parameters(), strict=True):
                assert_close(ours.grad, its.grad)
                ours -= 0.1 * ours.grad
                its -= 0.1 * its.grad
                ours.grad = its.grad = None


def test_functions_that_share_a_variable_share_the_copys():
    """What leads to nothing of the model's stays in common, as the function itself did."""
    count = 0

    def prepare(net: Leads) -> None:
        layer = net.a

        def replace(new: nn.Module) -> None:
            nonlocal layer
            layer = new

        def function(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return layer(x)

        net.function, net.replace = function, replace

    net = Leads(prepare)
    copied = copied_whole(net, {})
    copied.replace(nn.Identity())
    x = torch.randn(2, 4)
    assert torch.equal(copied.function(x), x)
    assert not torch.equal(net.function(x), x)
    assert count == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4).shape,
        lambda: {"size": torch.Size([3, 4])},
        lambda: torch.tensor([[1.0, 2.0]]).max(1),
    ],
    ids=["a size", "in a dict", "of C"],
)
def test_tuples_of_torchs_own_are_copied(make: Callable[[], Any]):
    """A size holds nothing that a copy has another one of, and was made anew by a tuple's method."""

    def prepare(net: Leads) -> None:
        net.kept = make()

    net = Leads(prepare)
    replicas = Replicas(net, [stages(2)] * 2, chunks=2)
    x = torch.randn(8, 4)
    replicas.forward_backward(x, target=x, loss_fn=mse_loss)
    copied = copied_whole(net, {})
    assert type(copied.kept) is type(net.kept)
    assert repr(copied.kept) == repr(net.kept)
