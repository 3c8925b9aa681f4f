"""Operations of several processes in a forward: all must make them in one order, and as often."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import blockpipe as bp
from blockpipe.costs import meter
from blockpipe.errors import StateError

from ..models import square
from ..stage_devices import stages


@pytest.fixture
def two() -> Iterator[None]:
    """A group of two processes, of which the other one is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Means(nn.Module):
    """Centres its activations on some stages by the mean over all processes."""

    def __init__(self, *on: int, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.on, self.reads = on, reads

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage=stage):
                x = layer(x)
                if stage in self.on:
                    mean = x.detach().mean(0)
                    dist.all_reduce(mean)
                    x = x - mean / 2
                if self.reads and x.sum().item() > 1e9:
                    x = x * 0
        return x


@pytest.mark.cpu("a backend for it")
def test_collectives_of_two_stages_are_refused(two):
    """Attack 20: lanes of two processes made them in other orders, and unrelated tensors were added."""
    pipe = bp.Pipeline(Means(0, 1), devices=stages(2), chunks=2)
    with pytest.raises(
        StateError, match=r"the order of collectives.* on hops \[0, 1\].*sequential"
    ):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    pipe = bp.Pipeline(Means(0, 1), devices=stages(2), chunks=2, schedule="sequential")
    pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


@pytest.mark.cpu("a backend for it")
@pytest.mark.parametrize("reads", [False, True])
def test_those_of_one_stage_run_and_no_recording_makes_them(two, reads: bool, monkeypatch):
    """Attack 20: one process recorded for real, alone, and its calls met the others' next ones."""
    left_out = []
    alone = meter.made_alone
    monkeypatch.setattr(meter, "made_alone", lambda *call: left_out.append(1) or alone(*call))
    pipe = bp.Pipeline(Means(1, reads=reads), devices=stages(2), chunks=2)
    assert pipe.summary(torch.randn(4, 4)) is not None
    assert bool(left_out) == reads
    pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    before = len(left_out)
    pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    assert len(left_out) == before


def test_one_process_alone_may_make_them_anywhere():
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        pipe = bp.Pipeline(Means(0, 1), devices=["cpu"] * 2, chunks=2)
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    finally:
        dist.destroy_process_group()
