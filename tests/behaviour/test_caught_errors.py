"""Errors that end a micro-batch, where the user's own code catches them."""

import contextlib
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ..stage_devices import stages

X = torch.randn(8, 4)


class Net(nn.Module):
    """Its second stage may fail, and goes on without what it could not do."""

    def __init__(self, tries: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.tries = nn.Linear(4, 4), nn.Linear(4, 4), tries
        self.left = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.left = h.detach().mean(0)
        with bp.Block(stage=1):
            time.sleep(0.05)
            return self.tries(self, self.b(h))


def _reads(net: Net, h: Tensor) -> Tensor:
    try:
        return h * (1 + net.left)
    except RuntimeError:
        return h


def _differentiates(net: Net, h: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        (gradient,) = torch.autograd.grad(h.sum(), net.a.weight, create_graph=True)
        return h + gradient.square().mean()
    return h


def _train(pipe: bp.Pipeline, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    for _ in range(3):
        pipe.forward_backward(X, target=X, loss_fn=loss)


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
@pytest.mark.parametrize("tries", [_reads, _differentiates], ids=lambda tries: tries.__name__)
def test_an_error_that_a_forward_catches_ends_the_step(tries) -> None:
    """The step went on with what the forward does then, without a word."""
    pipe = bp.Pipeline(Net(tries), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises((StateError, CrossingError)):
        _train(pipe, mse_loss)
    pipe.module.tries = lambda _, h: h
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)  # it is usable


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
def test_an_error_that_a_loss_catches_ends_the_step() -> None:
    net = Net(lambda _, h: h)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            output = output * (1 + net.left)
        return mse_loss(output, target)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match="belongs to micro-batch"):
        _train(pipe, loss)


def test_an_error_of_the_users_that_a_forward_catches_is_its_own() -> None:
    def tries(net: Net, h: Tensor) -> Tensor:
        try:
            return h.reshape(3, 3)
        except RuntimeError:
            return h

    net = Net(tries)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
