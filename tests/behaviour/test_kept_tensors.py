"""A tensor that one stage leaves on the model, and another one keeps as it is, by whatever way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import plain_step
from ..stage_devices import assert_close, stages

Keep = Callable[["Leaves", Tensor], object]


class Leaves(nn.Module):
    """The first stage leaves ``t``; ``keep`` runs on the second one."""

    def __init__(self, keep: Keep, *, on_first: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.keep, self.on_first = nn.Linear(4, 4), nn.Linear(4, 4), keep, on_first
        self.log: list[Any] = []

    def save(self, tensor: Tensor) -> None:
        self.log.append(tensor)

    def left(self) -> Tensor:
        found: Tensor = self.t
        return found

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.t = h.detach()
            if self.on_first:
                self.keep(self, h)
        with bp.Block(stage=1):
            out: Tensor = self.b(h)
            if not self.on_first:
                self.keep(self, out)
            return out


class Scales:
    """A hook that is an object."""

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.by.mean()


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    return gradient * by.mean()


def _by_variable(net: Leaves, out: Tensor) -> None:
    t = net.t
    net.log.append(t)


def _hooks(out: Tensor, by: Tensor) -> None:
    out.register_hook(lambda gradient: gradient * by.mean())


KEEPS: list[Keep] = [
    _by_variable,
    lambda net, out: net.save(net.t),
    lambda net, out: net.save(tensor=net.t),
    lambda net, out: net.log.append(net.left()),
    lambda net, out: net.log.append(net.t if net.training else None),
    lambda net, out: net.log.extend(t for t in [net.t]),
    lambda net, out: partial(net.log.append, net.t)(),
    lambda net, out: out.register_hook(partial(_scaled, by=net.t)),
    lambda net, out: out.register_hook(Scales(net.t)),
    lambda net, out: _hooks(out, net.t),
]


@pytest.mark.parametrize("keep", KEEPS)
def test_a_tensor_of_another_stage_that_is_kept_as_it_is_is_refused(keep: Keep) -> None:
    """It was another micro-batch's, as no operation looked whose it is."""
    pipe = bp.Pipeline(Leaves(keep), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="attribute 't' of the model"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


APART: list[tuple[Keep, bool]] = [
    (lambda net, h: net.save(net.t), True),
    (lambda net, out: net.save(out.detach()), False),
    (lambda net, out: net.save(net.t * 2), False),
    (lambda net, out: _hooks(out, out.detach() * 2), False),
]


@pytest.mark.parametrize(("keep", "on_first"), APART)
def test_what_a_stage_keeps_of_its_own_is_fine(keep: Keep, on_first: bool) -> None:
    """So is what an operation makes: it says whose it is."""
    net = Leaves(keep, on_first=on_first)
    plain = Leaves(keep, on_first=on_first)
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential") as pipe:
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert bp.record(net, x[:2]).shared_changes == []
