"""Memory that the first forward makes, keeps and fills, and that each later one fills again, while
the backward of an earlier micro-batch still reads it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.arange(32.0).view(8, 4) / 32


class Lazy(nn.Module):
    """Its first stage makes the memory in the first forward."""

    def __init__(self, use: Callable[["Lazy", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use
        self.kept: Any = None

    def room(self, h: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.empty_like(h)
        return self.kept  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.use(self, self.a(x))
        with bp.Block(stage=1):
            return self.b(h)


def _read_by_a_hook(net: Lazy, h: Tensor) -> Tensor:
    net.room(h).copy_((h > 0).float())
    h = h.view_as(h)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * net.kept)
    return h


def _read_by_a_hook_as_a_variable(net: Lazy, h: Tensor) -> Tensor:
    mask = net.room(h)
    mask.copy_((h > 0).float())
    h = h.view_as(h)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * mask)
    return h


def _written_by_data(net: Lazy, h: Tensor) -> Tensor:
    room = net.room(h)
    room.data.copy_(h.detach().abs())
    return h * room


def _read_by_data(net: Lazy, h: Tensor) -> Tensor:
    room = net.room(h)
    room.copy_(h.detach().abs())
    return h * room.data


def _packed(net: Lazy, h: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        return net.room(h).copy_(tensor.detach()) if tensor.shape == h.shape else tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return h.tanh()


USES = [
    *(_read_by_a_hook, _read_by_a_hook_as_a_variable, _written_by_data, _read_by_data, _packed),
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_memory_that_later_forwards_fill_again_is_refused(
    use: Callable[[Lazy, Tensor], Tensor], schedule: str
) -> None:
    """Gradients were those of another micro-batch, without a word."""
    pipe = bp.Pipeline(Lazy(use), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"a tensor of shape \(2, 4\)"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_micro_batches_one_by_one_may_fill_it_again(use: Callable[[Lazy, Tensor], Tensor]) -> None:
    net = Lazy(use)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    for _ in range(3):
        loss = pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss
        expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
        assert_close(loss, expected)
    assert_same_gradients(net, plain)


def _filled_once(net: Lazy, h: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.linspace(0.5, 1.0, 4).to(h)
        net.kept.data.mul_(2.0)
    h = h * net.kept.data
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * net.kept)
    return h


def test_memory_that_the_first_forward_alone_fills_is_fine() -> None:
    net = Lazy(_filled_once)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for _ in range(3):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)
