"""A buffer that one stage writes is not brought to another one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...stage_devices import stages

Reads = Callable[["Normed"], float]


class Normed(nn.Module):
    """Has a batch norm on stage 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(self.norm(x))
        with bp.Block(stage=1):
            return self.b(h)


WAYS: dict[str, Reads] = {
    "get_buffer": lambda net: float(net.get_buffer("norm.num_batches_tracked").item()),
    "state_dict": lambda net: float(net.state_dict()["norm.num_batches_tracked"].item()),
    "of the module": lambda net: float(net.norm.state_dict()["running_mean"].sum().item()),
    "found by class": lambda net: float(
        next(m for m in net.modules() if isinstance(m, nn.BatchNorm1d)).running_var.sum().item()
    ),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_finds_a_buffer_of_another_stage_is_refused(way: str, schedule: str) -> None:
    """It read what other micro-batches had written meanwhile, by timing without a word."""
    net = Normed()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * (1 + WAYS[way](net))

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    x = torch.randn(8, 4)

    def train() -> None:
        for _ in range(4):
            pipe.forward_backward(x, target=x, loss_fn=loss)

    with pytest.raises(StateError, match=r"norm\.(num_batches_tracked|running_)"):
        train()
