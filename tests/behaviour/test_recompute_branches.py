"""Recomputed calls with layers that did not run when the model was recorded."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import blockpipe as bp
from blockpipe.errors import StateError

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import stages

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "spectral norm": lambda: spectral_norm(nn.Linear(4, 4)),
}


class Experts(nn.Module):
    """Runs one of two layers that keep buffers; the data, or a count, choose it."""

    def __init__(self, norm: str, *, counts: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), NORMS[norm](), nn.Tanh()) for _ in range(2)
        )
        self.counts, self.calls = counts, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and not bp.is_recomputing():
            self.calls += 1
        is_second = self.calls > 6 if self.counts else x.mean().item() > 0.5
        return x + self.experts[int(is_second)](x).exp()


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.head = make(), make(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.first(x)
        with bp.Block(stage=1):
            return self.head(self.second(x - x.mean()))


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_that_data_choose_in_a_later_step_runs_as_if_once(
    norm: str, schedule: str, checkpoint: str
) -> None:
    net = Net(lambda: Experts(norm)).to(stages(1)[0])
    plain = copy.deepcopy(net)
    options: dict[str, Any] = {"chunks": 3, "schedule": schedule, "checkpoint": checkpoint}
    pipe = bp.Pipeline(net, devices=stages(2), **options)
    for step in range(4):  # from the third one on all micro-batches take the second expert
        x = torch.randn(6, 4) + 2 * (step > 1)
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x.to(stages(1)[0]),), {}, None, square, 3)
        found = difference(net, plain, loss, expected)
        assert found.same, found


def test_a_layer_that_a_count_chooses_in_a_later_step_is_refused() -> None:
    """Its buffers would be written once more, and nobody has kept what they were."""
    net = Net(lambda: Experts("batch norm", counts=True))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, checkpoint="always")
    for _ in range(2):
        pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
    with pytest.raises(StateError, match="'first'.* writes to its buffer .*set what it branches"):
        pipe.forward_backward(torch.randn(6, 4), loss_fn=square)


class Jittered(nn.Module):
    """Draws from a generator of its own between its layers, if the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.chance = nn.Linear(4, 4), nn.Linear(4, 4), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        if x.detach().abs().max() > 0.5:
            h = (h * self.chance.random()).tanh()
        return self.last(h).tanh()


def test_draws_from_a_generator_of_ones_own_in_a_later_step_are_compared() -> None:
    """The recomputation draws another number."""
    pipe = bp.Pipeline(Net(Jittered), devices=stages(2), chunks=3, checkpoint="always")
    for _ in range(2):
        pipe.forward_backward(torch.zeros(6, 4), loss_fn=square)
    with pytest.raises(StateError, match="with other numbers when it was recomputed"):
        pipe.forward_backward(torch.ones(6, 4), loss_fn=square)
