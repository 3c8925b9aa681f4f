"""Random numbers of small models, checkpoints and code that sets a generator."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.devices import rng_streams as randomness

from ..models import WITH_INTERLEAVED, square
from ..parameter_sets import each_value
from ..parity import difference
from ..stage_devices import equal, stages
from .drawing_models import chain, trained


@pytest.mark.parametrize("schedule", WITH_INTERLEAVED)
def test_small_models_and_plain_loops_draw_the_same(schedule, monkeypatch):
    """Whether threads pay makes no difference."""
    net, x = chain(), torch.randn(8, 6)
    first, expected, _ = trained(net, x, steps=3, schedule="sequential")
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_HOP", 1.0)
    other, loss, _ = trained(net, x, steps=3, schedule=schedule)
    assert difference(other, first, loss, expected).same


@each_value(
    schedule=[*WITH_INTERLEAVED, "uncut"],
    late=[False, True],
)
def test_a_checkpoint_in_glue_draws_its_mask_again(schedule, late):
    """``torch.utils.checkpoint`` keeps the generator's state before its first operation: that has
    to be the micro-batch's by then, on the first hop and behind a mark."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
            self.again = True

        def inner(self, x):
            return self.drop(self.a(x))

        def forward(self, x):
            if late:
                x = self.b(x)
            with bp.Block(stage=1 if late else 0):
                if self.again:
                    x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
                else:
                    x = self.inner(x)
            if late:
                return x
            with bp.Block(stage=1):
                return self.b(x)

    net, x, gradients = Net(), torch.randn(8, 8), []
    for net.again in (True, False):
        net.zero_grad()
        torch.manual_seed(3)
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        pipe.forward_backward(x, loss_fn=square)
        gradients.append([p.grad.clone() for p in net.parameters()])
        pipe.unplace()
    assert all(equal(a, b) for a, b in zip(*gradients, strict=True))


class _RunsAgain(nn.Module):
    """One stage checkpoints what draws nothing, the other draws."""

    def __init__(self, turns):
        super().__init__()
        self.a, self.b, self.note = nn.Linear(8, 8), nn.Linear(8, 8), turns

    def inner(self, x):
        self.note(randomness.is_own_turn())
        return self.a(x)

    def forward(self, x):
        with bp.Block(stage=0):
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        with bp.Block(stage=1):
            return self.b(F.dropout(x.tanh(), 0.1))


def test_what_is_run_again_takes_its_turn_where_others_draw():
    """torch sets the generator before it runs a part again, and after, whether it draws or not:
    another stage drew other numbers from run to run."""
    turns = []
    pipe = bp.Pipeline(_RunsAgain(turns.append), devices=stages(2), chunks=4)
    for _ in range(2):
        turns.clear()
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert turns.count(True) == 4, "once for each micro-batch's backward"
    assert len(turns) == 8


def test_code_that_sets_the_generator_counts_as_drawing():
    class Forks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with bp.Block(stage=0):
                with torch.random.fork_rng(devices=[]):
                    x = self.a(x)
            with bp.Block(stage=1):
                return self.b(x)

    recording = bp.record(Forks(), torch.ones(8, 8))
    assert [hop.draws for hop in recording.hops] == [{"torch"}, set()]
