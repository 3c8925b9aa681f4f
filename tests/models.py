"""Toy models, a loss, and lists of schedules that many tests share."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.schedules import builders

# One of each kind: a micro-batch at a time, all forwards first, each backward as early as it can be,
# and backwards in two parts.
SCHEDULES = ["sequential", "gpipe", "1f1b", "zb-h1"]
WITH_INTERLEAVED = [*SCHEDULES, "interleaved"]
WITH_UNCUT = [*SCHEDULES, "uncut"]
# One of each engine: lanes, lanes with real copies between stages, backwards in two parts, one thread.
ENGINES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "isolate": True},
    {"schedule": "zb-h1"},
    {"schedule": "uncut"},
]
EVERY_SCHEDULE = [*builders.SCHEDULES, "auto", "uncut"]


def square(output: Tensor) -> Tensor:
    """A loss of the output alone."""
    return output.square().mean()


def linears(stages: int, width: int = 4) -> nn.Sequential:
    """A linear layer on each stage."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(stages)))
    return bp.begin_blocks(net, {str(stage): stage for stage in range(1, stages)})


class FeedForward(nn.Module):
    """A residual layer that saves its input, the hidden layer's input to gelu and its result: with
    ``times=4``, 4 + 16 + 16 bytes for each number of its input."""

    def __init__(self, width: int, times: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))


class Scripted(nn.Module):
    """Three layers, and a forward that is given."""

    def __init__(self, script: Any, layer: Any = None) -> None:
        super().__init__()
        make = layer or (lambda: nn.Linear(4, 4))
        self.a, self.b, self.c = make(), make(), make()
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)
