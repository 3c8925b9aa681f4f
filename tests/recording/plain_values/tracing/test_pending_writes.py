"""Tensors that a stage leaves on ``self`` and reads on a later hop of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....stage_devices import stages

MAKES: dict[str, Callable[["Returns", Tensor], Tensor]] = {
    "an operation": lambda net, h: 1 + h.detach().mean().tanh(),
    "a number": lambda net, h: torch.tensor(1 + h.detach().mean().tanh().item()),
    "a list of numbers": lambda net, h: torch.tensor([h.detach().mean().item()] * 4),
    "a factory": lambda net, h: torch.full((), h.detach().mean().item()),
    "a row that data choose": lambda net, h: net.rows[int(h.detach().mean() > 0)],
}


class Returns(nn.Module):
    """It leaves a tensor on its first hop, and reads it when it comes back to that stage."""

    def __init__(self, make: Callable[["Returns", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.make, self.left = make, torch.ones(())
        self.register_buffer("rows", torch.tensor([[1.0], [2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.left = self.make(self, h)
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=0):
            return self.c(h) * self.left


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", MAKES)
def test_what_a_later_hop_of_the_stage_reads_is_refused_whatever_it_was_made_of(
    name: str, schedule: str
):
    """What no tensor of the forward's was in counted as a table, the same for all micro-batches;
    another one's was read, without a word, from the first step on."""
    pipe = bp.Pipeline(Returns(MAKES[name]), devices=stages(2), chunks=4, schedule=schedule)
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match="left"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
