"""Attributes that the user's code sets on parameters, buffers and other lasting tensors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)


class Scaled(nn.Parameter):
    """A parameter with a scale."""

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value


class Net(nn.Module):
    """Two layers on two stages, each with what a test does there."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = first, second
        self.register_buffer("buffer", torch.ones(4))
        self.constant, self.own = torch.ones(4), Scaled(torch.ones(4))
        self.b.weight.sizes = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh() * self.own
            h = h * self.first(self, h)
        with bp.Block(stage=1):
            return self.b(h) * self.second(self, h)


def _size(h: Tensor) -> float:
    return h.detach().abs().max().item()


def _sets(find: Callable[[Net], Any]) -> Callable[..., float]:
    def sets(net: Net, h: Tensor) -> float:
        find(net).scale = _size(h)
        return 1.0

    return sets


def _reads(find: Callable[[Net], Any]) -> Callable[..., float]:
    return lambda net, h: find(net).scale


def _sets_an_element(net: Net, h: Tensor) -> float:
    net.b.weight.sizes[0] = _size(h)
    return 1.0


def _counts(net: Net, h: Tensor) -> float:
    net.a.weight.count = getattr(net.a.weight, "count", 0) + 1
    return 1.0 / net.a.weight.count


def _sets_its_own(net: Net, h: Tensor) -> float:
    net.a.weight.scale = _size(h)
    return net.a.weight.scale


def _keeps_a_tensor(net: Net, h: Tensor) -> float:
    net.b.weight.seen = h.mean()
    return 1.0


def _one(net: Net, h: Tensor) -> float:
    return 1.0


FOUND: dict[str, tuple[Callable[[Net], Any], str]] = {
    "a parameter": (lambda net: net.b.weight, r"b\.weight\.scale"),
    "a buffer": (lambda net: net.buffer, r"buffer\.scale"),
    "a constant": (lambda net: net.constant, "attribute 'scale' of a Tensor"),
    "a property": (lambda net: net.own, r"own\._scale"),
}


def _refused(net: Net, what: str) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=rf"{what} on hops \[0\] .* reads it on hops \[1\]"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize("case", FOUND)
def test_an_attribute_of_a_tensor_that_another_stage_reads_is_refused(case: str) -> None:
    """The other stage read a later micro-batch's value."""
    find, what = FOUND[case]
    _refused(Net(_sets(find), _reads(find)), what)


def test_a_list_in_an_attribute_of_a_parameter_that_another_stage_reads_is_refused() -> None:
    _refused(Net(_sets_an_element, lambda net, h: net.b.weight.sizes[0]), "a list")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_counts, _one),
        (_sets_its_own, _one),
        (_keeps_a_tensor, lambda net, h: net.b.weight.seen),
    ],
)
def test_an_attribute_of_a_parameter_on_one_stage_or_with_a_tensor_gives_the_plain_loops_numbers(
    first: Callable[..., Any], second: Callable[..., Any]
) -> None:
    net = Net(first, second)
    plain = copy.deepcopy(net)
    with bp.Pipeline(net, devices=stages(2), chunks=4) as pipe:
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)
