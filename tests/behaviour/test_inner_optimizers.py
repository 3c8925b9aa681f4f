"""An optimizer that a forward steps: a stage that learns by a loss of its own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import equal, stages

KINDS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}


class Net(nn.Module):
    """The second stage's layer learns in the forward, and may say how well."""

    def __init__(self, kind: str, *, says: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.optimizer, self.losses = KINDS[kind](self.b.parameters()), []
        self.says = says

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            loss = (self.b(h.detach()).tanh() - h.detach()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.says:
                self.losses.append(loss.item())
            with torch.no_grad():
                learned = self.b(h)
            return self.c(h + learned)


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_in_the_plain_loop(kind: str, says: bool) -> None:
    """The recording steps it too, and leaves neither values nor fake tensors in its state."""
    net = Net(kind, says=says)
    plain, x = copy.deepcopy(net), torch.randn(6, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule="sequential")
    for _ in range(3):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 3)
    assert difference(net, plain, loss, expected).same
    assert equal(net.b.weight, plain.b.weight)
    assert net.losses == pytest.approx(plain.losses)
    state = [value for own in net.optimizer.state.values() for value in own.values()]
    assert {type(value) for value in state} == {Tensor}
