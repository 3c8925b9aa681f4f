"""Models and helpers of several test files."""

import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp

from ..stage_devices import equal, stages

X, Y = torch.randn(8, 6), torch.randn(8, 6)


def make(cuts=(2, 4)):
    """Linear layers with a norm between, tied first and last, cut where asked."""
    net = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
    )
    net[4].weight = net[0].weight
    return bp.begin_blocks(net, {str(at): stage for stage, at in enumerate(cuts, 1)})


def pipeline(net=None, cuts=(2, 4), **options):
    return bp.Pipeline(
        make(cuts) if net is None else net,
        **{"devices": stages(len(cuts) + 1), "chunks": 2, **options},
    )


def step(pipe, optimizer):
    optimizer.zero_grad()
    loss = pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss).loss
    optimizer.step()
    return loss


def same_state(one, other):
    """Whether two state dicts are equal to the bit."""
    assert list(one) == list(other)
    return all(equal(one[name], other[name]) for name in one)


def copies(state):
    """What a state dict holds now."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def read(source):
    """Everything a source has."""
    tensors = {n: torch.empty(h.shape, dtype=h.dtype) for n, h in source.headers.items()}
    for name, tensor in tensors.items():
        source.read(name, tensor)
    return tensors
