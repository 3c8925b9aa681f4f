"""Writes that all readers of the same memory see, where the graph is not cut."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import CrossingError

from ..alike import DEVICE, check_alike
from ..models import Scripted, square
from ..stage_devices import is_simulated, stages
from .uncut_forwards import B, a_view_crossed_too

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


# --- writes, seen by all that reads the same memory


def in_place(s, x):
    with B(0):
        h = s.a(x) * 1
    with B(1):
        h.add_(s.b.bias)
    with B(2):
        y = s.c(h)
    with B(0):
        return y + h


def through_a_view_made_there(s, x):
    with B(0):
        h = s.a(x) * 1
    with B(1):
        w = h[:, 1:3]
        w *= s.b.bias[:2]
    with B(0):
        y = s.a(h)
    with B(2):
        return s.c(y) + h


def data_alone(s, x):
    with B(0):
        h = s.a(x) + 0
    with B(1):
        h.detach().mul_(2)
        with torch.no_grad():
            h.add_(1)
    with B(2):
        y = s.c(h)
    with B(0):
        return y + h


def at_home_after_it_crossed(s, x):
    with B(0):
        h = s.a(x) * 1
    with B(1):
        w = h[:, :2]
        y = w + 1
    with B(0):
        h.mul_(s.a.bias)
    with B(1):
        return s.b(h) + w.sum() + y.sum()


def two_views_of_one_memory(s, x):
    with B(0):
        h = s.a(x) * 1
        v, w = h[:, :3], h[:, 1:]
    with B(1):
        v.mul_(s.b.bias[:3])
        y = w + 0
        w.add_(s.b.bias[1:])
        y = y + v
    with B(2):
        return s.c(h) + y.sum() + v.sum() * w.sum()


def views_of_the_copies(s, x):
    """Both were made on the later stage; what writes to one of them is not given the other."""
    with B(0):
        h = s.a(x) * 1
        v = h[:, :3]
    with B(1):
        part, other = h[:, 1], v[:, 1:]
        part.mul_(s.b.bias[0])
        y = other + 0
        other.add_(s.b.bias[1])
        y = y.sum() + part.sum()
    with B(2):
        return s.c(h) + y + v.sum()


def on_three_devices(s, x):
    with B(0):
        h = s.a(x) * 1
    with B(1):
        one = h + 0
    with B(2):
        h.mul_(2)
        two = h + 0
    with B(1):
        h.add_(s.b.bias)
        one = one + h
    with B(2):
        return s.c(one) + two + h


def slices_are_assigned(s, x):
    with B(0):
        h = s.a(x) * 1
    with B(1):
        h[:, 0] = s.b.bias[0]
        h[1:, 1] = h[:-1, 2]
    with B(2):
        return s.c(h) * h


def out_is_another_stages(s, x):
    with B(0):
        h, made = s.a(x), torch.zeros_like(x)
    with B(1):
        torch.mul(h.detach(), 2, out=made)
        y = s.b(h) + made
    with B(0):
        return y + made


def by_a_module(s, x):
    relu = nn.ReLU(inplace=True)
    with B(0):
        h = s.a(x) * 1
    with B(1):
        y = s.b(relu(h))
    with B(0):
        return s.a(y) + h


def an_input(s, x):
    with B(0):
        h = s.a(x + 1)
    with B(1):
        x.add_(1)
        y = s.b(h)
    with B(2):
        return s.c(y) + x


def read_first_without_gradient(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        with torch.no_grad():
            scale = h.abs().mean()
        h = s.b(h) * scale
    with B(2):
        return s.c(h)


WRITES = [
    in_place,
    through_a_view_made_there,
    data_alone,
    at_home_after_it_crossed,
    two_views_of_one_memory,
    views_of_the_copies,
    on_three_devices,
    slices_are_assigned,
    out_is_another_stages,
    by_a_module,
    an_input,
    read_first_without_gradient,
]


@pytest.mark.every
@pytest.mark.parametrize("forward", WRITES)
def test_every_later_reader_sees_a_write(forward):
    """On its home's device and on others, through views too, as in the plain loop."""
    check_alike(Scripted(forward), X.clone(), schedule="uncut")


@pytest.mark.every
@pytest.mark.parametrize("forward", [*WRITES, a_view_crossed_too])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_later_reader_sees_a_write_without_gradients(forward, mode):
    """The same under ``no_grad`` and in inference mode, whose tensors count no writes."""
    net = Scripted(forward)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, schedule="uncut")
    with mode():
        expected = torch.cat([plain(part.clone()) for part in X.to(DEVICE).split(3)])
        found = pipe(X.clone())
    torch.testing.assert_close(found.cpu(), expected.cpu())


def test_a_module_that_may_have_missed_a_write():
    """It gets two views of one memory and writes to one: on several devices, an error that says
    what to do, and does not offer what it is under already."""

    class Both(nn.Module):
        def forward(self, one, other):
            one.mul_(2)
            return one.sum() + other.sum()

    both = Both()

    def forward(s, x):
        with B(0):
            h = s.a(x) * 1
            v = h[:, :2]
        with B(1):
            y = s.both(h, v)
        with B(2):
            return s.c(h) + y

    net = Scripted(forward)
    net.both = both
    if not is_simulated():
        check_alike(net, X, schedule="uncut")
        return
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3, schedule="uncut")
    with pytest.raises(
        CrossingError, match=r"two views|another view of it .*clone\(\) it"
    ) as raised:
        pipe.forward_backward(X, loss_fn=square)
    assert "schedule=" not in str(raised.value)


def test_a_leaf_made_in_the_forward_does_not_outlive_it():
    """A leaf made in the forward, read on another device: no cycle through its copy."""
    kept = []

    def forward(s, x):
        with B(0):
            leaf = x.detach().requires_grad_()
            kept.append(weakref.ref(leaf))
            h = s.a(leaf)
        with B(1):
            h = s.b(h) + leaf
        with B(2):
            return s.c(h) + leaf

    pipe = bp.Pipeline(Scripted(forward), devices=stages(3), chunks=2, schedule="uncut")
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
