"""Models and helpers of several test files."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp

from ..models import square
from ..parity import difference
from ..stage_devices import stages

MODES = ["never", "except_last", "always"]


class Layer(nn.Module):
    """A residual layer that saves much more than its input."""

    def __init__(self, width, p=0.0):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)
        self.calls = []

    def forward(self, x):
        self.calls.append(bp.is_recomputing())
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x)))))


def layers(p=0.0, **marks):
    net = nn.Sequential(nn.Linear(16, 8), *(Layer(8, p) for _ in range(5)), nn.Linear(8, 2))
    net[3] = bp.BeginBlock(net[3], stage=1, **marks)
    net[5] = bp.BeginBlock(net[5], stage=2)
    return net


def step(net, x, steps=1, **options):
    pipe = bp.Pipeline(net, devices=stages(3), **{"chunks": 4, **options})
    for _ in range(steps):
        loss = pipe.forward_backward(x, loss_fn=square).loss
    return pipe, loss


def again(net):
    """For each layer how often it ran for the second time."""
    return [sum(layer.calls) for layer in net if isinstance(layer, Layer)]


class Wide(nn.Module):
    """Saves much; what it does besides is the test's, before or in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, *more):
        return self.down(self.up(x).tanh().exp().sin())


def compared(net, x, schedule="1f1b", steps=2, mode="always", **options):
    """Whether a step that recomputes is one that does not; what ran, too."""
    results = []
    for model, settings_ in (
        (copy.deepcopy(net), {"schedule": "sequential"}),
        (net, {"schedule": schedule, "checkpoint": mode, **options}),
    ):
        torch.manual_seed(0)
        count = bp.record(model, x).num_stages
        pipe = bp.Pipeline(model, devices=stages(count), chunks=4, **settings_)
        for _ in range(steps):
            loss = pipe.forward_backward(x, loss_fn=square).loss
        results.append((model, loss))
    (plain, expected), (model, loss) = results
    return difference(model, plain, loss, expected).same, pipe
