"""``schedule="uncut"``: one ordinary graph, on any devices. What errors offer it for, it does."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ..alike import DEVICE, check_alike
from ..models import Scripted, square
from ..parity import plain_step
from ..stage_devices import is_simulated, stages

B = bp.Block
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


# --- what the other schedules refuse, and say that this one does


def a_view_crossed_too(s, x):
    with B(0):
        h = s.a(x) * 1
        v = h[:, :2]
    with B(1):
        w = v + 2
        h.mul_(3)
    with B(2):
        return s.c(h) + w.sum()


def the_base_after_its_view_was_written(s, x):
    with B(0):
        h = s.a(x) * 1
        v = h[:, :2]
    with B(1):
        v.mul_(3)
    with B(2):
        return s.c(h)


def the_gradient_of_another_stages_tensor(s, x):
    with B(0):
        h = s.a(x).tanh()
    with B(1):
        y = s.b(h).tanh()
        (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        return s.b(y + g)


def a_force(s, x):
    with B(0):
        x = x.detach().requires_grad_()
        h = s.a(x).tanh()
    with B(1):
        energy = s.b(h).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    with B(2):
        return s.c(force)


def a_gradient_that_is_given(s, x):
    with B(0):
        h = s.a(x).tanh()
    with B(1):
        (g,) = torch.autograd.grad(h, s.a.weight, torch.ones_like(h) * 2, create_graph=True)
        return s.b(h) + g.sum()


def a_backward_in_the_forward(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        y = s.b(h)
        (y.sum() * 0.1).backward(retain_graph=True)
        return y


def a_backward_of_another_stages_tensor(s, x):
    with B(0):
        h = s.a(x).tanh()
    with B(1):
        y = s.b(h)
        h.backward(torch.ones_like(h) * 0.1, retain_graph=True)
        return y


def rebound_data(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        before = s.b(h)
        h.data = torch.ones_like(h) * 2
        after = s.b(h)
    with B(2):
        return s.c(before) + after * h


def detached_in_place(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        before = h + s.b.bias
        h.detach_()
        after = s.b(h)
    with B(2):
        return s.c(before) + after * h


def asked_for_a_gradient(s, x):
    with B(0):
        h = s.a(x).detach()
    with B(1):
        first = s.b(h)
        h.requires_grad_()
        y = s.b(h).tanh().sum()
        (g,) = torch.autograd.grad(y, h, create_graph=True)
    with B(2):
        return s.c(g) + first


def a_parameter_written_elsewhere(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        with torch.no_grad():
            s.a.bias.add_(1)
        return s.b(h) + s.a.bias


def a_backward_of_torchs(s, x):
    with B(0):
        h = s.a(x).tanh()
    with B(1):
        y = s.b(h)
        torch.autograd.backward([h.sum(), y.sum() * 0.1], retain_graph=True)
    with B(2):
        torch.autograd.backward(y, torch.ones_like(y), retain_graph=True)
        return s.c(y)


REFUSED = {
    a_view_crossed_too: CrossingError,
    the_base_after_its_view_was_written: CrossingError,
    the_gradient_of_another_stages_tensor: CrossingError,
    a_force: CrossingError,
    a_gradient_that_is_given: CrossingError,
    a_backward_in_the_forward: CrossingError,
    a_backward_of_another_stages_tensor: CrossingError,
    a_backward_of_torchs: CrossingError,
    rebound_data: CrossingError,
    detached_in_place: CrossingError,
    asked_for_a_gradient: CrossingError,
    a_parameter_written_elsewhere: StateError,
}


@pytest.mark.parametrize("forward", list(REFUSED))
def test_what_is_refused_with_this_remedy_runs_with_it(forward):
    """The message of the error names ``schedule="uncut"``, and under it the program trains as in the
    plain loop."""
    pipe = bp.Pipeline(Scripted(forward), devices=stages(3), chunks=3)
    with pytest.raises(REFUSED[forward], match="schedule='uncut'"):
        pipe.forward_backward(X, loss_fn=square)
    check_alike(Scripted(forward), X, schedule="uncut")


def test_each_backward_goes_into_a_graph_from_outside():
    """Each micro-batch's backward goes into it, as in the plain loop."""

    def trained(make, device):
        outside = torch.ones(4, device=device, requires_grad=True)
        shifted = outside + 2

        def forward(s, x):
            with B(0):
                h = s.a(x)
            with B(1):
                return s.b(h) * shifted

        torch.manual_seed(2)
        net = Scripted(forward).to(device)
        make(net)
        return net, outside.grad.cpu()

    def piped(net, **options):
        pipe = bp.Pipeline(net, devices=stages(3), chunks=3, **options)
        pipe.forward_backward(X.to(DEVICE), loss_fn=square)

    def plain(net):
        plain_step(net, (X.to(DEVICE),), {}, None, square, 3)

    with pytest.raises(CrossingError, match="made outside of this forward.*schedule='uncut'"):
        trained(piped, DEVICE)
    (ours, ours_outside), (theirs, theirs_outside) = (
        trained(lambda net: piped(net, schedule="uncut"), DEVICE),
        trained(plain, DEVICE),
    )
    torch.testing.assert_close(ours_outside, theirs_outside)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())


def test_the_graph_behind_an_input_has_one_backward():
    """Each micro-batch has a backward of its own; the graph behind the input has one."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(h)

    net, source = Scripted(forward), X.clone().requires_grad_()
    net(source.square()).mean().backward()
    expected, source.grad = source.grad, None
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3, schedule="uncut")
    pipe.forward_backward(source.square(), loss_fn=torch.mean)
    torch.testing.assert_close(source.grad, expected)


class Counting(Scripted):
    """It counts its calls in a buffer."""

    def __init__(self, script):
        super().__init__(script)
        self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize("back", [False, True])
def test_a_buffer_that_several_stages_write_and_read(back):
    """The message offers it, on any devices: micro-batches come one after the other."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
            s.seen.add_(1)
        with B(1):
            h = s.b(h) + s.seen
            if back:
                s.seen.mul_(2)
        with B(2):
            return s.c(h) + s.seen

    pipe = bp.Pipeline(Counting(forward), devices=stages(3), chunks=3)
    with pytest.raises(StateError, match="schedule='uncut'"):
        pipe.forward_backward(X, loss_fn=square)
    check_alike(Counting(forward), X, schedule="uncut")


def test_one_forward_may_have_several_backwards():
    """``pipe(x)``: a second backward, a gradient alone, a gradient of a gradient."""
    net = Scripted(lambda s, x: s.c(s.b(s.a(x)).tanh()))
    bp.begin_blocks(net, {"b": 1, "c": 2})
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, schedule="uncut")

    def use(model, parameters):
        loss = square(model(X.to(DEVICE)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(g.square().sum().to(DEVICE) for g in grads).backward()
        return [p.grad.cpu() for p in parameters], [g.detach().cpu() for g in grads]

    found, expected = use(pipe, [*net.parameters()]), use(plain, [*plain.parameters()])
    torch.testing.assert_close(found, expected)


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


@pytest.mark.parametrize("forward", WRITES)
def test_every_later_reader_sees_a_write(forward):
    """On its home's device and on others, through views too, as in the plain loop."""
    check_alike(Scripted(forward), X.clone(), schedule="uncut")


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
