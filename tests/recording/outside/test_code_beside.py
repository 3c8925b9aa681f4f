"""Losses and hooks that change for a while what other stages use."""

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...stage_devices import stages

SETTINGS = {"scale": 1.0}


class Net(nn.Module):
    """Two layers on two stages; a hook of the first one does what a test gives it."""

    def __init__(self, change: Callable[["Net"], None] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * SETTINGS["scale"]
            if self.change is not None:
                h.register_hook(self.hook)
        with bp.Block(stage=1):
            return self.b(h)

    def hook(self, gradient: Tensor) -> Tensor:
        self.change(self)
        return gradient


def _with_features(net: Net) -> None:
    handle = net.a.register_forward_hook(lambda module, args, out: out * 2)
    handle.remove()


def _with_other_parameters(net: Net) -> None:
    values = {name: value * 2 for name, value in net.a.named_parameters()}
    functional_call(net.a, values, (torch.ones(1, 4),))


def _deterministic(net: Net) -> None:
    torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def _elsewhere(net: Net) -> None:
    with contextlib.chdir("/"):
        os.listdir(".")


def _patched(net: Net) -> None:
    with mock.patch.dict(SETTINGS, scale=2.0):
        pass


def _by_one_kernel(net: Net) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        pass


EVERYWHERE = [_deterministic, _elsewhere, _patched, _by_one_kernel]


@pytest.mark.parametrize("change", [_with_features, _with_other_parameters, *EVERYWHERE])
def test_a_loss_that_changes_what_others_use_is_refused(change: Callable[[Net], None]):
    """Attack 25: the forward of another micro-batch ran under it."""
    net = Net()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        change(net)
        return mse_loss(out, target)

    with pytest.raises(StateError, match="sets, in a loss or a hook, and others run under it"):
        pipe.forward_backward(x, target=y, loss_fn=loss)


@pytest.mark.parametrize("change", EVERYWHERE)
def test_a_hook_that_changes_what_others_use_is_refused(change: Callable[[Net], None]):
    pipe = bp.Pipeline(Net(change), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="sets, in a loss or a hook, and others run under it"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


@pytest.mark.parametrize("change", [_with_features, _with_other_parameters])
def test_a_loss_may_change_a_module_of_its_own(change: Callable[[Any], None]):
    """A teacher's features are nobody else's."""
    teacher = Net()

    def loss(out: Tensor, target: Tensor) -> Tensor:
        change(teacher)
        return mse_loss(out, target)

    pipe = bp.Pipeline(Net(), devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=loss)
