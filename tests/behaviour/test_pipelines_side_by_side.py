"""Pipelines of different models in two threads, whose forwards share an object."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..alike import DEVICE
from ..parity import plain_step
from ..stage_devices import assert_close, stages

STEPS, CHUNKS = 6, 3


class Tracker:
    """Counts forwards, for each model of an experiment under its own name."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("first", "second"), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tracker":
        return self


class Net(nn.Module):
    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__()
        self.a, self.b, self.name, self.tracker = nn.Linear(6, 6), nn.Linear(6, 6), name, tracker

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.tracker.counts[self.name] += 1
            x = self.a(x).tanh() * (1 + self.tracker.counts[self.name] / 10)
        with bp.Block(stage=1):
            return self.b(x)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_each_counts_under_its_own_name(schedule: str) -> None:
    """Attack 39: what one counted was a value set between two steps of the other one, which was
    recorded anew, and put it back."""
    x, tracker = torch.randn(6, 6), Tracker()
    nets = {name: Net(name, tracker) for name in tracker.counts}
    expected = {}
    for name, net in nets.items():
        plain, there = copy.deepcopy(net).to(DEVICE), x.to(DEVICE)
        given = plain, (there,), {}, there, mse_loss, CHUNKS
        expected[name] = [plain_step(*given) for _ in range(STEPS)]
    tracker.counts.update(dict.fromkeys(nets, 0))
    found: dict[str, list[Tensor]] = {name: [] for name in nets}
    pipes = {
        name: bp.Pipeline(net, devices=stages(2), chunks=CHUNKS, schedule=schedule, sample=(x[:2],))
        for name, net in nets.items()
    }

    def train(name: str) -> None:
        for _ in range(STEPS):
            step = pipes[name].forward_backward(x, target=x, loss_fn=mse_loss)
            found[name].append(step.loss)

    threads = [threading.Thread(target=train, args=(name,)) for name in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.counts == dict.fromkeys(nets, STEPS * CHUNKS)
    for name, losses in found.items():
        for loss, other in zip(losses, expected[name], strict=True):
            assert_close(loss, other)
