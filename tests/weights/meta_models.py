"""Models and helpers of several test files."""

import torch
from torch import nn

import blockpipe as bp

from ..stage_devices import equal, stages


class Net(nn.Module):
    """Three stages, a tied weight, buffers of both kinds, a skip."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.c.weight = self.a.weight
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x):
        h = self.norm(self.a(x))
        with bp.Block(1):
            h = self.b(h) * self.scale
        with bp.Block(2):
            return self.c(h) + x


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


def fill_scale(module):
    """What an ``init=`` does for ``Net``'s buffer."""
    if isinstance(module, Net):
        module.scale.fill_(2.0)


def pipeline(net, **options):
    return bp.Pipeline(net, **{"devices": stages(3), "chunks": 2, **options})


def same_state(one, other):
    """Whether two models hold the same tensors, buffers that are not persistent too."""
    pairs = [dict((*m.named_parameters(), *m.named_buffers())) for m in (one, other)]
    assert pairs[0].keys() == pairs[1].keys()
    return all(equal(pairs[0][name], pairs[1][name]) for name in pairs[0])
