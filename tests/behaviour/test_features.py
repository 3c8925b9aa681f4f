"""Features: what a hook keeps of a module in the midst of others, for the loss."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)


def _key() -> Any:
    return bp.current_microbatch()


KEEPS: dict[str, tuple[Any, Callable[[Any, Tensor], None], Callable[[Any], Tensor]]] = {
    "dictionary": ({}, lambda held, h: held.update(x=h), lambda held: held["x"]),
    "list": ([None], lambda held, h: held.__setitem__(0, h), lambda held: held[0]),
    "object": (
        SimpleNamespace(x=None),
        lambda held, h: setattr(held, "x", h),
        lambda held: held.x,
    ),
    "for each": ({}, lambda held, h: held.update({_key(): h}), lambda held: held.pop(_key())),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
@pytest.mark.parametrize("how", KEEPS)
def test_a_feature_of_an_inner_module_when_the_loss_reads_it_counts(
    how: str, schedule: str
) -> None:
    """It was taken for a tensor from outside, because nothing in the forward reads it."""
    held, put, get = copy.deepcopy(KEEPS[how])
    net = Net()
    plain = copy.deepcopy(net).to(stages(1)[0])
    net.b[1][0].register_forward_hook(lambda module, args, h: put(held, h))
    plain.b[1][0].register_forward_hook(lambda module, args, h: held.__setitem__(0, h))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + get(held).square().mean()

    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule=schedule)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.forward_backward(x, target=y, loss_fn=loss)
    held, get = [None], lambda held: held[0]
    plain_step(plain, (x.to(stages(1)[0]),), {}, y, loss, 2)
    assert_same_gradients(net, plain)
