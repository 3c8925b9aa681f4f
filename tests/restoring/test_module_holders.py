"""What TorchScript's code keeps: put back after a recording, and seen where stages share it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..models import square
from ..parameter_sets import every_pair
from ..parity import plain_step
from ..stage_devices import stages

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Counts(nn.Module):
    """Counts calls, lists them, replaces one buffer and writes to another one."""

    n: int

    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen = 0, [0]
        self.register_buffer("made", torch.zeros(4))
        self.register_buffer("written", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.seen.append(self.n)
        self.made = self.made + x.mean(0).detach()
        self.written.add_(x.mean(0).detach())
        return x + self.made


class Net(nn.Module):
    """Has a scripted module on one stage, and may read what that keeps on the other one."""

    def __init__(self, scripted: Any, *, on: int = 1, reads: str = "", asks: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.scripted = nn.Linear(4, 4), nn.Linear(4, 4), scripted
        self.on, self.reads, self.asks = on, reads, asks

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage):
                x = layer(x)
                if self.asks and x.abs().max().item() > 1e9:  # so that it is recorded for real
                    raise ValueError(x)
                if stage == self.on:
                    x = self.scripted(x)
                elif self.reads in ("made", "written"):
                    x = x + getattr(self.scripted, self.reads).sum()
                elif self.reads == "n":
                    x = x * self.scripted.n
                elif self.reads == "seen":
                    x = x * len(self.scripted.seen)
        return x


def _scripted(kind: str) -> Any:
    if kind == "traced":
        return torch.jit.trace(nn.BatchNorm1d(4), torch.randn(2, 4))
    return torch.jit.script(nn.BatchNorm1d(4) if kind == "scripted" else Counts())


def _kept(net: nn.Module) -> dict[str, Any]:
    plain = {name: getattr(net.scripted, name, None) for name in ("n", "seen")}
    return plain | {name: buffer.cpu().tolist() for name, buffer in net.named_buffers()}


@pytest.mark.cpu("a scripted batch norm counts in another kernel there")
@every_pair(kind=["scripted", "traced", "own"], asks=[False, True])
def test_what_a_scripted_module_keeps_is_the_plain_loops(kind: str, asks: bool) -> None:
    """A recording, ``verify`` and reports left their counts in it."""
    net = Net(_scripted(kind), asks=asks)
    plain, x = copy.deepcopy(net), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    pipe.forward_backward(x, loss_fn=square)
    plain_step(plain, (x,), {}, None, square, 4)
    assert _kept(net) == _kept(plain)
    pipe.verify(x)
    pipe.memory(x)
    pipe.summary(x)
    assert _kept(net) == _kept(plain)


@every_pair(reads=["n", "seen", "made", "written"], on=[0, 1])
def test_what_a_scripted_module_keeps_when_another_stage_reads_it_is_refused(
    reads: str, on: int
) -> None:
    """Its code is not seen: other numbers, silently."""
    pipe = bp.Pipeline(Net(_scripted("own"), on=on, reads=reads), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"scripted\."):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
