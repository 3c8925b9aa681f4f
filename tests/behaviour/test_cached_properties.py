"""Cached properties, which an object has in its own dictionary."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step


class _Cached(nn.Module):
    """Its first stage empties a cached property, as a cache is invalidated."""

    def __init__(self, empty: Callable[["_Cached"], object], *, reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.empty, self.reads = empty, reads

    @functools.cached_property
    def factor(self) -> float:
        return 1 / (1 + self.calls)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh() * self.factor
            self.calls += 1
            self.empty(self)
        with bp.Block(stage=1):
            h = self.b(h)
            return h * self.factor if self.reads else h


@pytest.mark.parametrize(
    "empty",
    [
        lambda net: net.__dict__.pop("factor", None),
        lambda net: delattr(net, "factor"),
    ],
)
def test_a_cached_property_that_one_stage_empties_is_its_own(
    empty: Callable[[_Cached], object],
) -> None:
    net, plain = _Cached(empty), _Cached(empty)
    plain.load_state_dict(net.state_dict())
    pipe, x = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4), torch.randn(8, 4)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_same_gradients(net, plain)
    pipe = bp.Pipeline(_Cached(empty, reads=True), devices=["cpu"] * 2, chunks=4)
    with pytest.raises(StateError):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
