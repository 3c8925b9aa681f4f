"""Models and helpers of several test files."""

import copy
import random

import numpy as np
import torch
from torch import nn

import blockpipe as bp

from ..models import square
from ..stage_devices import stages


class Noisy(nn.Module):
    """Draws from torch, Python and numpy; skips itself at random, as LayerDrop does."""

    def __init__(self, kinds=("torch",), layerdrop=0.0):
        super().__init__()
        self.layer, self.kinds, self.layerdrop = nn.Linear(6, 6), kinds, layerdrop

    def forward(self, x):
        if "torch" in self.kinds:
            x = nn.functional.dropout(x, 0.5) + torch.randn(6, device=x.device)
        if "random" in self.kinds:
            x = x * random.random()
        if "numpy" in self.kinds:
            x = x * float(np.random.rand())
        if self.layerdrop and torch.rand(()) < self.layerdrop:
            return x
        return self.layer(x)


def chain(**options):
    net = nn.Sequential(*(Noisy(**options) for _ in range(4)))
    return bp.begin_blocks(net, {"1": 1, "2": 2})


def trained(net, x, steps=2, loss_fn=square, **options):
    """After a seed: the net, the last loss, and what the generators draw next."""
    net = copy.deepcopy(net)
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    pipe = bp.Pipeline(net, **{"devices": stages(3), "chunks": 4, **options})
    for _ in range(steps):
        loss = pipe.forward_backward(x, loss_fn=loss_fn).loss
    return net, loss, (float(torch.rand(())), random.random(), float(np.random.rand()))
