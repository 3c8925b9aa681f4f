"""What a crossing is made of."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.preparation import prepared

from ..parity import assert_same_gradients, plain_step

SECONDS = 60


class Hands(nn.Module):
    """Hands a tensor to the second stage, in which a module is recomputed, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = torch.tanh(self.norm(self.a(x)))
        with bp.Block(stage=1):
            h = torch.tanh(self.b(h))
            h = h + self.wide(h)
            return self.c(h) + x


@pytest.mark.cpu("it runs in a process of its own")
def test_lanes_under_anomaly_mode_do_not_wait_for_each_other():
    """Autograd makes a leaf's node in a lock, where that mode lets go of the interpreter: two lanes
    that entered their graphs at once waited for ever, each for what the other one had."""
    subprocess.run([sys.executable, "-m", __name__], check=True, timeout=SECONDS)


def _train() -> None:
    prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0  # on lanes
    warnings.simplefilter("ignore")
    net = Hands()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, checkpoint="always")
    for _ in range(20):
        x = torch.randn(8, 8)
        with torch.autograd.detect_anomaly():
            pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
    assert_same_gradients(net, plain)


if __name__ == "__main__":
    _train()
