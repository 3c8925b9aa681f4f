"""Captured calls: what they compute, and what is not captured. torch's captures are on CUDA alone, and
``test_cuda.py`` has them; here calls are replayed by Python that keeps memory as a capture does."""

import copy

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.preparation import captured
from blockpipe.preparation.preparer import CompileOptions

from ..models import square
from ..parity import difference, plain_step

REPLAYED = []  # each call by its graph's number


def graphed(run, inputs):
    """As captures do: it runs the call some times first, and has one memory for each value."""
    number = len(REPLAYED)
    needed = [t for t in inputs if t.requires_grad]

    def gradients(outputs, given):
        roots = [out for out in outputs if out.requires_grad]
        found = torch.autograd.grad(
            roots,
            needed,
            [g for g, o in zip(given, outputs, strict=True) if o.requires_grad],
            allow_unused=True,
        )
        rest = iter(found)
        return [next(rest) if t.requires_grad else None for t in inputs]

    for _ in range(3):
        made = run(*inputs)
        gradients(made, [torch.ones_like(out) for out in made])
    results = [out.detach().clone() for out in made]
    static = [None if t is None else torch.empty_like(t) for t in inputs]
    kept = []

    class Replays(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            REPLAYED.append(number)
            for own, new in zip(inputs, given, strict=True):
                if own.data_ptr() != new.data_ptr():
                    own.detach().copy_(new)
            with torch.enable_grad():
                kept[:] = run(*inputs)
            for own, new in zip(results, kept, strict=True):
                own.copy_(new.detach())
            return tuple(own.detach() for own in results)

        @staticmethod
        def backward(ctx, *given):
            for own, new in zip(static, gradients(kept, given), strict=True):
                if new is not None:
                    own.copy_(new)
            return tuple(
                own if t.requires_grad else None for own, t in zip(static, inputs, strict=True)
            )

    REPLAYED.append(number)
    return Replays.apply


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    REPLAYED.clear()
    monkeypatch.setattr(captured, "_can_be_captured", lambda tensor: True)
    monkeypatch.setattr(captured, "_graphed", graphed)


def captures(net, **options):
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, **options)
    pipe._preparer.compile(CompileOptions(None, cuda_graphs=True))
    return pipe


def failures(pipe):
    return {
        path: graphs.failure
        for prepared in pipe._preparer.known.values()
        for path, graphs in prepared.compiled.graphs.items()
        if graphs.failure
    }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return nn.functional.dropout(self.norm(self.linear(x)).tanh(), 0.5, self.training)


def make_net(second=None):
    return bp.begin_blocks(nn.Sequential(Block(), second or Block()), {"1": 1})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "uncut"])
def test_replays_are_the_calls(schedule):
    """Gradients, statistics and draws of several steps are those of a pipeline without captures."""
    net = make_net()
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = captures(net, schedule=schedule)
    uncaptured = bp.Pipeline(plain, devices=["cpu"] * 2, chunks=4, schedule=schedule)
    losses = []
    for each in (pipe, uncaptured):
        torch.manual_seed(1)
        losses.append([each.forward_backward(x, loss_fn=square).loss for _ in range(3)])
        losses[-1].append(torch.rand(3))
    for own, expected in zip(*losses, strict=True):
        assert torch.equal(own, expected)
    assert difference(net, plain, losses[0][2], losses[1][2]).same
    assert not failures(pipe)
    assert len(REPLAYED) > 2 * 4 * 2
    assert "captured as CUDA graphs: 0, 1" in str(pipe.summary())


def test_the_parameters_nodes_are_not_in_a_capture():
    """They may be alive, on another stream: a capture has leaves of its own, in the same memory."""
    net, x = make_net(nn.Linear(6, 6)), torch.randn(8, 6)
    seen = []

    def hook(gradient):
        seen.append(gradient.shape)

    net[1].weight.register_hook(hook)
    pipe = captures(net)
    pipe.forward_backward(x, loss_fn=square)
    assert len(seen) == 4, "once for each micro-batch, and not by warming up"


class Counts(nn.Linear):
    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class CountsElsewhere(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.counts = {"calls": [0]}

    def forward(self, x):
        self.counts["calls"][0] += 1
        return super().forward(x)


class Writes(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Replaces(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x - self.mean)


class Hides(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        object.__setattr__(self, "alias", self.weight)

    def forward(self, x):
        return nn.functional.linear(x, self.alias, self.bias)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counts, "changes values of its own"),
        (CountsElsewhere, "changes values of its own"),
        (Writes, "writes to what it is given|in-place operation"),
        (Replaces, "another tensor in the place of a buffer|changes values of its own"),
        (Hides, "a weight that is none of its parameters"),
    ],
)
def test_what_a_replay_would_leave_out_is_not_captured(kind, why):
    """Such a module runs as it is written; the numbers and its state are the plain loop's."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), kind(6, 6)), {"1": 1})
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = captures(net)
    for _ in range(3):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same
    assert getattr(net[1], "count", 0) == getattr(plain[1], "count", 0)
    assert getattr(net[1], "counts", 0) == getattr(plain[1], "counts", 0)
    found = failures(pipe)
    assert list(found) == ["1"]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found["1"])
    assert "not captured as CUDA graphs: 1: " in str(pipe.summary())
