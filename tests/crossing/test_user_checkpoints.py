"""``torch.utils.checkpoint`` of the user's, in the glue: what runs again reads what the forward read,
on the devices where the forward was."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    checkpoint_sequential,
    set_checkpoint_early_stop,
)

import blockpipe as bp

from ..alike import DEVICE, check_alike, ran, same
from ..behaviour.checkpointed_forwards import B, a_closure, again
from ..models import ENGINES, Scripted, square
from ..stage_devices import stages

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def asks_for_its_device(s, x):
    """What it makes is on the device of the stage that is recomputed, not of the last one."""
    with B(0):
        h = s.a(x)
    with B(1):

        def body(t):
            ones = torch.ones(t.shape, device=h.device)
            return s.b(t) * ones * torch.arange(4.0, device=t.device)

        y = again(body, h)
    with B(2):
        return s.c(y).tanh()


def a_sealed_body(s, x):
    """The checkpoint is in the glue, and all its operations are inside of a sealed module."""
    with B(0):
        h = s.a(x)
    with B(1):
        h = again(s.b, h)
    with B(2):
        return again(s.c, h).tanh()


def a_sealed_body_of_a_foreign_tensor(s, x):
    """What it is given has not been read on its stage before."""
    with B(0):
        h = s.a(x)
    with B(1):
        y = s.b(h)
    with B(2):
        return again(s.c, h) + y


def around_stages(s, x):
    """Each stage's backward runs the whole of it again."""
    w = s.b.weight

    def several(t):
        t = s.a(t) @ w
        with B(1):
            t = F.linear(t, w).tanh()
        with B(2):
            return s.c(t).sin()

    return again(several, x) + x


def around_a_return_to_a_stage(s, x):
    """The stage is visited twice, by two hops."""

    def several(t):
        t = s.a(t).tanh()
        with B(1):
            u = s.b(t).tanh()
        with B(0):
            return s.a(u).sin() * t

    y = again(several, x)
    with B(2):
        return s.c(y)


def nested(s, x):
    """A checkpoint in a checkpoint, of several stages each."""

    def inner(t):
        t = s.b(t).tanh()
        with B(2):
            return s.c(t).tanh() * t

    def outer(t):
        t = s.a(t).tanh()
        with B(1):
            return again(inner, t).sin()

    return again(outer, x)


def in_sequence(s, x):
    """``checkpoint_sequential``, one stage's segments."""
    with B(0):
        h = s.a(x)
    with B(1):
        h = checkpoint_sequential([s.b, torch.tanh, s.b, torch.tanh], 2, h, use_reentrant=False)
    with B(2):
        return s.c(h)


def written_before(s, x):
    """The closure reads what the stage wrote into another stage's tensor."""
    with B(0):
        h = s.a(x) * 1
    with B(1):
        h.mul_(2)
        y = again(lambda t: s.b(t).tanh() * h, h)
    with B(2):
        return s.c(y) + h


def written_after(s, x):
    """A later stage writes to its own copy of what the closure reads, on several devices."""
    with B(0):
        h = s.a(x) * 1
    with B(1):
        y = again(lambda t: s.b(t).tanh().exp(), h.clone())
    with B(2):
        h.mul_(2)
        return s.c(y) + h


def before_the_first_operation(s, x):
    """It begins before the forward has come anywhere."""

    def several(t):
        with B(0):
            t = s.a(t).tanh()
        with B(1):
            return s.b(t).tanh()

    y = again(several, x)
    with B(2):
        return s.c(y)


def tied(s, x):
    """A parameter of another stage."""
    with B(0):
        h = s.a(x)
    with B(1):
        h = again(lambda t: F.linear(t, s.a.weight).tanh(), h)
    with B(2):
        return s.c(h)


def under_autocast(s, x):
    """It is run again under the same autocast."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with B(0):
            h = s.a(x)
        with B(1):
            y = again(lambda t: s.b(t).tanh() * h, h)
    with B(2):
        return s.c(y.float())


def not_stopped_early(s, x):
    """It runs to its end."""
    with B(0):
        h = s.a(x)
    with B(1), set_checkpoint_early_stop(False):
        y = again(lambda t: s.b(t).tanh() * h, h)
    with B(2):
        return s.c(y)


FORWARDS = [
    a_closure,
    asks_for_its_device,
    a_sealed_body,
    a_sealed_body_of_a_foreign_tensor,
    around_stages,
    around_a_return_to_a_stage,
    nested,
    in_sequence,
    written_before,
    written_after,
    before_the_first_operation,
    tied,
    under_autocast,
    not_stopped_early,
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_are_those_of_the_plain_loop(forward, engine):
    """By every engine; isolated stages prove that nothing foreign is read."""
    check_alike(Scripted(forward), X, **engine)


def test_a_checkpointed_hop_has_its_backward_whole():
    """A hop that is run again by torch has its backward whole; the others' may be split."""
    check_alike(Scripted(a_closure), X, schedule="zb-h1")


@pytest.mark.parametrize("forward", [a_closure, around_stages, nested])
def test_a_checkpoint_runs_again_in_the_callers_backward(forward):
    """``pipe(x)`` uncut: what is run again runs when the caller asks, after the step."""
    for schedule in ("uncut", "gpipe"):
        net = Scripted(forward)
        plain = copy.deepcopy(net).to(DEVICE)
        square(plain(X.to(DEVICE))).backward()
        pipe = bp.Pipeline(net, devices=stages(3), chunks=2, schedule=schedule)
        loss = square(pipe(X))
        loss.backward()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu())


class Dropping(nn.Module):
    """A layer that draws."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x)).tanh()


def one_stage_draws(s, x, wrap):
    with B(0):
        h = s.a(x)
    with B(1):
        y = wrap(lambda t: F.dropout(s.b(t), 0.5) * h.tanh(), h)
    with B(2):
        return s.c(y)


def all_stages_draw(s, x, wrap):
    def several(t):
        t = s.a(t).exp()
        with B(1):
            t = F.dropout(s.b(t), 0.5).exp()
        with B(2):
            return s.c(t).sin()

    return wrap(several, x)


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("script", [one_stage_draws, all_stages_draw])
def test_random_numbers_are_drawn_again(script, schedule):
    """On every device that it visits, and everything after it draws what it would have drawn."""

    def with_(wrap):
        torch.manual_seed(3)
        net = Scripted(lambda s, x: script(s, x, wrap), Dropping)
        torch.manual_seed(5)
        options = {"devices": stages(3), "schedule": schedule}
        found = ran(net, X, **options)
        return *found, torch.rand(3)

    (net, loss, after), (plain, expected, then) = with_(again), with_(lambda f, *args: f(*args))
    same(net, plain, (loss, expected))
    assert torch.equal(after, then)


def test_it_is_known_that_it_runs_again():
    """``is_recomputing()`` and ``current_microbatch()`` say so, in whatever thread it runs."""
    seen = []

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):

            def body(t):
                seen.append((bp.is_recomputing(), bp.current_microbatch(), bp.current_stage()))
                return s.b(t).tanh() * h

            y = again(body, h)
        with B(2):
            return s.c(y)

    pipe = bp.Pipeline(Scripted(forward), devices=stages(3), chunks=2, schedule="sequential")
    pipe.forward_backward(X, loss_fn=square)
    assert seen == [(False, 0, 1), (True, 0, 1), (False, 1, 1), (True, 1, 1)]


def test_the_models_batch_norm_counts_once_where_it_is_deferred():
    """What runs again is not counted."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.layer(x)).tanh()

    net = Scripted(a_sealed_body, Normed)
    once, loss = ran(net, X, devices=stages(3), deferred_batch_norm=True)
    without = Scripted(lambda s, x: x, Normed)
    without.load_state_dict(net.state_dict())

    def plain(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            h = s.b(h)
        with B(2):
            return s.c(h).tanh()

    without.script = plain
    other, expected = ran(without, X, devices=stages(3), deferred_batch_norm=True)
    same(once, other, (loss, expected))


def test_a_checkpoint_does_not_keep_its_forward():
    """Not even without the garbage collector: a checkpoint does not keep the run it is in."""
    kept = []

    def forward(s, x):
        with B(0):
            h = s.a(x)
        kept.append(weakref.ref(h))
        with B(1):
            y = again(lambda t: s.b(t).tanh() * h, h)
        with B(2):
            return s.c(y)

    for schedule in ("1f1b", "uncut"):
        pipe = bp.Pipeline(Scripted(forward), devices=stages(3), chunks=2, schedule=schedule)
        pipe.forward_backward(X, loss_fn=square)
        kept.clear()
        gc.collect()
        gc.disable()
        try:
            pipe.forward_backward(X, loss_fn=square)
            assert len(kept) == 2
            assert all(ref() is None for ref in kept)
        finally:
            gc.enable()


def test_torchs_own_hook_is_back():
    """What was replaced is torch's again after a step, and after one that failed."""
    from torch.utils import checkpoint as module

    before = module._checkpoint_hook
    pipe = bp.Pipeline(Scripted(a_closure), devices=stages(3), chunks=2)
    pipe.forward_backward(X, loss_fn=square)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        pipe.forward_backward(X, loss_fn=lambda o: 1 / 0)
    assert module._checkpoint_hook is before
