"""The reentrant kind of checkpoint: a function whose backward runs its function again."""

import copy

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
)

import blockpipe as bp
from blockpipe.errors import CrossingError

from ..alike import check_alike, same
from ..models import WITH_UNCUT, Scripted, square
from ..parity import difference, plain_step
from ..stage_devices import stages
from .checkpointed_forwards import B, a_closure, again

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


# --- the reentrant kind: a custom function, whose backward runs its function again


def reentrant(s, x):
    """What it needs is among its arguments."""
    with B(0):
        h = s.a(x)
    with B(1):
        h = checkpoint(lambda t, u: s.b(t).tanh() * u, h, h * 2, use_reentrant=True)
    with B(2):
        return checkpoint(s.c, h, use_reentrant=True)


@pytest.mark.parametrize("schedule", WITH_UNCUT)
def test_a_reentrant_checkpoint_on_one_stage_is_as_plain(schedule):
    """On one stage it is handled."""
    check_alike(Scripted(reentrant), X, schedule=schedule)


def test_a_reentrant_checkpoint_over_another_stages_tensor_is_refused():
    """Its function runs without interception, forward and back."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            y = s.b(h)
            return checkpoint(lambda t: t.tanh() * h, y, use_reentrant=True)

    with pytest.raises(
        CrossingError, match="'CheckpointFunction' on stage 1 reads .*use_reentrant"
    ):
        bp.record(Scripted(forward), X)


def test_plain_step_is_what_is_meant():
    """The reference itself: with a checkpoint and without, the same."""
    net = Scripted(a_closure)
    other = Scripted(lambda s, x: s.c(y := s.b(h := s.a(x)).tanh() * h) + y)
    other.load_state_dict(net.state_dict())
    losses = [plain_step(n, (X,), {}, None, square, 3) for n in (net, other)]
    same(net, other, (losses[0], losses[1]))


def test_a_reentrant_checkpoint_around_stages_is_refused():
    """Its backward is one node of one hop's graph."""

    def forward(s, x):
        def several(t):
            with B(1):
                return s.b(t)

        return checkpoint(several, s.a(x), use_reentrant=True)

    with pytest.raises(CrossingError, match="use_reentrant=False"):
        bp.record(Scripted(forward), X)


@pytest.mark.parametrize("schedule", ["sequential", "1f1b", "gpipe"])
def test_an_offloaded_checkpoint_runs_again_with_what_was_written(schedule, monkeypatch):
    """torch saves what a checkpoint is given by hooks; a write on another stage is in it."""
    monkeypatch.setattr("blockpipe.crossing.offload.SMALLEST", 0)
    monkeypatch.setattr("blockpipe.crossing.offload.on_cpu_too", True)

    def forward(s, x):
        with B(0):
            y = s.a(x)
        with B(1):
            y[:, :3] = 0.5
            y = again(lambda t: s.b(t).tanh(), y)
        with B(2):
            return s.c(y.cumsum(1))

    net = Scripted(forward)
    plain = copy.deepcopy(net)
    expected = plain_step(plain, (X,), {}, None, square, 2)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, schedule=schedule, offload=True)
    for _ in range(2):
        net.zero_grad()
        loss = pipe.forward_backward(X, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("through", ["a module", "its weight"])
def test_a_reentrant_checkpoint_of_another_stages_parameter_is_refused(schedule, through):
    """It runs again where nobody could hand it a copy: said when it is recorded."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            body = s.a if through == "a module" else (lambda t: t @ s.a.weight)
            h = checkpoint(lambda t: body(t).tanh(), h, use_reentrant=True)
            return s.c(s.b(h))

    pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=2, schedule=schedule)
    with pytest.raises(CrossingError, match=r"'a\.weight' of stage 0 .*use_reentrant=False"):
        pipe.forward_backward(X, loss_fn=square)
