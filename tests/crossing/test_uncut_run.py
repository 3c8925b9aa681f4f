"""``schedule="uncut"``: one ordinary graph, on any devices. What errors offer it for, it does."""

import copy

import pytest
import torch

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ..alike import DEVICE, check_alike
from ..behaviour.uncut_forwards import B, a_view_crossed_too
from ..models import Scripted, square
from ..parity import plain_step
from ..stage_devices import stages

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


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
