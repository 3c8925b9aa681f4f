"""Writes that a recording for real undoes, where no version or place tells of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp

from ..models import square
from ..stage_devices import equal, stages


class Norm(nn.Module):
    """Its statistics are parameters that need no gradient, as some checkpoints save them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.var = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class Net(nn.Module):
    """Reads a value, so that it is recorded for real, and writes to tensors beside its modules'."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = Norm(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.weight.seen = torch.zeros(4)
        self.prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if x.abs().max().item() > 1e9:
                raise ValueError(x)
            for seen in (self.a.weight.seen, self.prior.loc):
                seen.lerp_(x.detach().mean(0).to(seen.device), 0.1)
            x = self.a(self.norm(x))
        with bp.Block(stage=1):
            return self.b(x)


def test_what_a_recording_writes_to_parameters_and_tensors_beside_them_is_undone() -> None:
    """A batch norm counts no version, and attributes of tensors are not saved."""
    net = Net()
    x, seen, other = torch.randn(8, 4), torch.zeros(4), Norm()
    for part in x.chunk(4):
        seen.lerp_(part.mean(0), 0.1)
        other(part)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    pipe.forward_backward(x, loss_fn=square)
    assert equal(net.a.weight.seen, seen)
    assert equal(net.prior.loc, seen)
    assert equal(net.norm.mean, other.mean)
    assert equal(net.norm.var, other.var)
