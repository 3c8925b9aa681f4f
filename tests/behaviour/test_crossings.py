"""The crossing table: each row is handled, found at recording, or found at replay; never silent."""

import copy
import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp

from ..alike import DEVICE, check_alike
from ..models import ENGINES, Scripted, square
from ..parameter_sets import every_pair
from ..parity import difference, plain_step
from ..stage_devices import stages

B = bp.Block


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * weight * 2, (g * x * 2).sum(0)


class ByAnother(torch.autograd.Function):
    """Its backward calls another custom function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Double.apply(g * x, torch.ones_like(x[0]))


def _scale(a, b):
    return torch.relu(a) + b


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_scale)


def row(forward):
    forward.is_row = True
    return forward


class Handled:
    """Rows whose gradients equal the plain run's, to the bit."""

    @row
    def read_by_skips_of_any_length(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            y = self.b(h)
        with B(2):
            return self.c(y) + h + x

    @row
    def in_place_on_a_foreign_tensor_result_dropped(self, x):
        with B(0):
            h = self.a(x) * 1
        with B(1):
            h.add_(self.b.bias)
        with B(2):
            return self.c(h) + h

    @row
    def in_place_through_a_view_of_the_import(self, x):
        with B(0):
            h = self.a(x) * 1
        with B(1):
            h[:, :2].mul_(2)
        with B(2):
            return self.c(h) + h

    @row
    def in_place_on_one_stage_after_another(self, x):
        with B(0):
            h = self.a(x) * 1
        with B(1):
            h.add_(self.b.bias)
        with B(2):
            h.mul_(self.c.bias)
        with B(0):
            h[:, 0] += 1
        with B(1):
            return self.b(h) + h

    @row
    def in_place_through_detach(self, x):
        with B(0):
            h = self.a(x) + 0
        with B(1):
            h.detach().mul_(2)
            y = self.b(x)
        with B(2):
            return self.c(y) + h

    @row
    def in_place_through_data(self, x):
        with B(0):
            h = self.a(x) + 0
        with B(1):
            h.data.mul_(2)
        with B(2):
            return self.c(x) + h

    @row
    def setitem(self, x):
        with B(0):
            h = self.a(x) * 1
        with B(1):
            h[:, 0] = self.b.bias[0]
        with B(2):
            return self.c(h) * h

    @row
    def relu_inplace_at_the_door(self, x):
        relu = nn.ReLU(inplace=True)
        with B(0):
            h = self.a(x) * 1
        with B(1):
            y = self.b(relu(h))
        with B(2):
            return self.c(y) + h

    @row
    def first_read_under_no_grad(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            with torch.no_grad():
                scale = h.abs().mean()
            return self.b(h) * scale

    @row
    def custom_function_in_glue(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            return self.b(Double.apply(h, self.b.weight[0]))

    @row
    def scripted_function_in_glue(self, x):
        with B(0):
            h = scripted()(self.a(x), x)
        with B(1):
            return scripted()(self.b(h), h) + self.a.bias

    @row
    def out_argument(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            made = torch.empty_like(h)
            torch.mul(h.detach(), 2, out=made)
            return self.b(h) + made

    @row
    def expanded_and_transposed(self, x):
        with B(0):
            h = self.a(x).mean(1, keepdim=True).expand(-1, 4)
            t = self.a.weight.t() * 2
        with B(1):
            return self.b(h) + h @ t

    @row
    def integers_bools_and_no_grad_tensors(self, x):
        with B(0):
            h = self.a(x)
            index, mask, fixed = h.argmax(1), h > 0, h.detach()
        with B(1):
            return torch.where(mask, self.b(h), fixed)[torch.arange(len(x)), index]

    @row
    def inside_containers(self, x):
        with B(0):
            h = {"a": [self.a(x)], "n": None, "k": 3}
        with B(1):
            (y,) = h["a"]
            return torch.stack([self.b(y), y]).sum(0) * h["k"]

    @row
    def metadata_without_a_copy(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            assert h.shape == (len(x), 4)
            assert h.requires_grad
            assert h.dim() == 2
            return self.b(torch.ones(h.shape, dtype=h.dtype, device=h.device))

    @row
    def tied_parameters(self, x):
        with B(0):
            h = F.linear(x, self.a.weight)
        with B(1):
            h = F.linear(h, self.a.weight) + self.b(h)
        with B(2):
            return F.linear(h, self.a.weight)

    @row
    def checkpoint_in_glue(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            return checkpoint(lambda t: self.b(t).tanh() * h, h, use_reentrant=False)

    @row
    def checkpoint_around_stages(self, x):
        """Each of their backwards runs it again, also one that has no import of its input."""
        w = self.b.weight

        def several(t):
            t = self.a(t) @ w
            with B(1):
                t = F.linear(t, w).tanh()
            with B(2):
                return self.c(t)

        x = F.linear(x, self.a.weight)
        return checkpoint(several, x, use_reentrant=False) + x

    @row
    def saved_tensor_hooks_in_glue(self, x):
        with B(0):
            h = self.a(x)
        with B(1), torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            return self.b(h) * h

    @row
    def tensor_hook_fires_once_with_the_sum(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            h.register_hook(lambda g: g.clamp(-0.01, 0.01))
            y = self.b(h)
        with B(2):
            return self.c(y) + h

    @row
    def autograd_grad_within_a_stage(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            y = (self.b(h) * 1).requires_grad_()
            (g,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
            return self.c(g)

    @row
    def autograd_grad_through_custom_functions(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            y = self.b(h).requires_grad_()
            (g,) = torch.autograd.grad(ByAnother.apply(y).sum(), y, create_graph=True)
            return self.c(ByAnother.apply(g)) + y

    @row
    def asked_after_it_was_written_elsewhere(self, x):
        with B(0):
            h = x * 1
        with B(1):
            h.mul_(self.b.bias)
            assert h.requires_grad == torch.is_grad_enabled()
        with B(2):
            assert h.requires_grad == torch.is_grad_enabled()
            return self.c(h) + self.a(x)

    @row
    def return_to_a_stage(self, x):
        with B(0):
            h = self.a(x)
        with B(1):
            y = self.b(h)
        with B(0):
            return self.a(y) + self.c(h)


ROWS = {name: f for name, f in vars(Handled).items() if getattr(f, "is_row", False)}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("name", list(ROWS))
def test_a_handled_row_trains_as_plain(name, engine):
    """The gradients, the loss and the outputs are the plain run's, isolated too."""
    check_alike(Scripted(ROWS[name]), torch.randn(6, 4), **engine)


def _set_parts(self, x):
    with B(0):
        h = self.a(x)
        c = torch.complex(h, h.sin()) * 1
        c.real = c.real * 2
    with B(1):
        c.imag = c.real * 3
        return self.b(c.real + c.imag)


@pytest.mark.cpu("the simulated accelerator has no complex numbers")
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_parts_of_a_complex_tensor_that_are_set_train_as_plain(engine):
    """torch's setters go through no function mode."""
    check_alike(Scripted(_set_parts), torch.randn(6, 4), **engine)


NEED_GRADIENTS = {
    "autograd_grad_through_custom_functions",
    "autograd_grad_within_a_stage",
    "metadata_without_a_copy",
    "tensor_hook_fires_once_with_the_sum",
}


@every_pair(
    name=[name for name in ROWS if name not in NEED_GRADIENTS],
    mode=[torch.no_grad, torch.inference_mode],
    isolate=[False, True],
)
def test_a_handled_row_without_gradients_is_as_plain(name, mode, isolate):
    """The outputs are the plain run's; in inference mode no tensor of the forward's counts what is
    written to it."""
    net, x = Scripted(ROWS[name]), torch.randn(6, 4)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, isolate=isolate)
    with mode():
        expected = torch.cat([plain(part.clone()) for part in x.to(DEVICE).split(3)])
        found = pipe(x.clone())
    torch.testing.assert_close(found.cpu(), expected.cpu())


class Borrows(nn.Module):
    """A layer that has another one's weight in a plain list, so that it is no parameter of it."""

    def __init__(self, other):
        super().__init__()
        self.own, self.borrowed = nn.Linear(4, 4), [other.weight]

    def forward(self, x):
        return F.linear(self.own(x), self.borrowed[0])


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "sequential"])
def test_a_module_may_hold_a_parameter_of_another_stage_in_a_list(schedule, isolate):
    """The recording took it for a constant, sealed the module, and each gradient of the weight was
    added in the order in which stages came to it; with a device each it failed."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net.append(Borrows(net[0]))
    bp.begin_blocks(net, {"2": 1, "3": 2})
    check_alike(net, torch.randn(6, 4), schedule=schedule, isolate=isolate)


def test_running_state_on_one_stage_is_ordinary():
    """An EMA that is written and read on one stage is as in the plain loop."""

    class Averaging(Scripted):
        def __init__(self, forward):
            super().__init__(forward)
            self.register_buffer("mean", torch.zeros(4))
            self.count = 0

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            count = s.count
            s.mean = s.mean * 0.9 + h.detach().mean(0) * 0.1
            y = s.b(h) - s.mean
            s.count = count + 1
            return y

    net = Averaging(forward)
    plain = copy.deepcopy(net)
    x = torch.randn(6, 4)
    expected = plain_step(plain, (x,), {}, None, square, 3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, isolate=True)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same
    assert net.count == plain.count == 3


def test_state_behind_the_first_mark_with_operations_waits_for_its_turn():
    """Also if nothing runs in the blocks before: the second micro-batch read it before the first
    had set it."""
    came = threading.Event()

    def forward(s, x):
        with B(0), B(0):
            rows = len(x)
        with B(1):
            count = s.count
            came.wait(0.05) if bp.current_microbatch() == 0 else came.set()
            s.count = count + rows
            h = s.a(x) * s.count
        with B(0):
            return s.b(h)

    net = Scripted(forward)
    net.count = 0
    plain = copy.deepcopy(net)
    x = torch.randn(4, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    for _ in range(2):  # in the first step, each hop waits for its turn anyway
        expected = plain_step(plain, (x,), {}, None, square, 2)
        came.clear()
        loss = pipe.forward_backward(x, loss_fn=square).loss
        assert difference(net, plain, loss, expected).same


def test_uncut_is_the_remedy_for_autograd_grad():
    """A force model: the gradient of an energy by its input, inside the forward."""

    def forward(s, x):
        with B(0):
            x = x.detach().requires_grad_()
            h = s.a(x).tanh()
        with B(1):
            energy = s.b(h).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    net = Scripted(forward)
    plain = copy.deepcopy(net)
    x = torch.randn(6, 4)
    expected = plain_step(plain, (x,), {}, None, square, 3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule="uncut")
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same
