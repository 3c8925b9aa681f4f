"""State that steps have left under one cut of a model, and that those under another one read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, host, stages

X = torch.arange(64.0).view(16, 4) / 64


class Remembers(nn.Module):
    """One stage, which is ``cut``, keeps a state that it alone reads and writes."""

    def __init__(self, update: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.update, self.cut = update, 1
        self.kept = torch.zeros(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=self.cut):
            self.update(self, h.detach().mean(0))
            h = self.b(h + self.kept.to(h.device) * 0.1 + self.mean.clone() * 0.1)
        with bp.Block(stage=1):
            return self.c(h)


def _adds(net: Any, new: Tensor) -> None:
    net.kept += 1


def _replaces(net: Any, new: Tensor) -> None:
    net.kept = net.kept.to(new.device) * 0.9 + new


def _replaces_buffer(net: Any, new: Tensor) -> None:
    net.mean = net.mean * 0.9 + new


UPDATES = [_adds, _replaces, _replaces_buffer]


def _step(pipe: bp.Pipeline) -> None:
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _plain(net: nn.Module) -> None:
    plain_step(net, (X,), {}, X, mse_loss, 4)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("is_other", [False, True])
def test_state_goes_on_under_another_cut(
    update: Callable[[Any, Tensor], None], is_other: bool
) -> None:
    net = Remembers(update)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        _step(pipe)
        _plain(plain)
    net.cut = 0
    if is_other:
        pipe.unplace()
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        _step(pipe)
        _plain(plain)
    assert_same_gradients(net, plain)
    assert_close(host(net.kept), host(plain.kept))
    assert_close(host(net.mean), host(plain.mean))


@pytest.mark.parametrize("update", UPDATES)
def test_balance_after_a_step_reads_what_that_has_left(
    update: Callable[[Any, Tensor], None],
) -> None:
    net = Remembers(update)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    _step(pipe)
    pipe.unplace()
    assert bp.balance(net, X, 2)
