"""Crossings that are refused, and the remedies that their errors name."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import CrossingError, PlanError, StateError

from ..alike import DEVICE, check_alike
from ..models import Scripted, square
from ..parity import difference, plain_step
from ..stage_devices import is_simulated, stages
from .crossing_models import found

B = bp.Block


def test_view_and_base_written_on_another_stage():
    """Versions belong to the storage: a view that crossed would miss the write."""

    def forward(s, x):
        with B(0):
            h = s.a(x) * 1
            v = h[:, :2]
        with B(1):
            w = v * 2
            h.mul_(3)
        with B(2):
            return s.c(h) + w.sum()

    found(forward, CrossingError, "of which views crossed as well")


def test_base_read_after_its_view_was_written_on_another_stage():
    """The base was not handed to the write, and would miss it."""

    def forward(s, x):
        with B(0):
            h = s.a(x) * 1
            v = h[:, :2]
        with B(1):
            v.mul_(3)
        with B(2):
            return s.c(h)

    found(forward, CrossingError, "written in place on a later stage through another view")


def test_rebinding_a_foreign_tensor():
    """``.data =``, ``detach_`` and the like have no copy to stand in for them."""

    def detach(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            h.detach_()
            return s.b(h)

    def data(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            h.data = torch.zeros_like(h)
            return s.b(h)

    found(detach, CrossingError, "detach_ on stage 1 is given a tensor")
    found(data, CrossingError, "of another stage")


def test_autograd_grad_across_stages():
    """The graph is cut between them."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            y = s.b(h)
            (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
            return y + g

    found(forward, CrossingError, "autograd.grad on stage 1 is given a tensor")


def test_backward_in_the_forward_across_stages():
    """It would come to the cut, and lose what lies behind."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            y = s.b(h)
            (y.sum() * 0.1).backward(retain_graph=True)
            return y

    found(forward, CrossingError, "a backward in the forward")


def test_marks_inside_a_custom_function():
    """Its backward is one node of one hop's graph: the other stages' parts would run there."""

    def forward(s, x):
        def several(t):
            with B(1):
                return s.b(t)

        return s.c(checkpoint(several, s.a(x), use_reentrant=True))

    found(forward, CrossingError, r"'CheckpointFunction' asks for stage 1 .*use_reentrant=False")


def test_no_plan_cuts_inside_a_custom_function():
    """A model that checkpoints its layers the old way: the search says so, and cuts elsewhere."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.last(x)

    net, x = Deep(), torch.randn(4, 8)
    plan = bp.balance(net, x, 2, measure=False)
    assert next(a for a in plan.assignments if a.stage == 1).path == "last"
    with pytest.raises(PlanError, match="inside of autograd.Function 'CheckpointFunction'"):
        bp.balance(net, x, 3, measure=False)
    with pytest.raises(CrossingError, match="'CheckpointFunction' asks for stage 1"):
        bp.record(net, x, plan=bp.StagePlan.from_layout("layers.1.0=1"))
    plain = copy.deepcopy(net)
    expected = plain_step(plain, (x,), {}, None, square, 2)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, plan=plan, isolate=True)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same


def test_gradient_path_from_outside():
    """An untagged tensor with a gradient path is an error, not a guess."""
    outside = torch.ones(4, requires_grad=True) * 2

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(h) + outside

    found(forward, CrossingError, "made outside of this forward")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_whose_operations_no_function_mode_sees(grad):
    """A scripted one: its call counts as an operation, and may be a stage of its own."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            y = s.b(h)
        with B(2):
            return s.c(y) + h

    net, x = Scripted(forward), torch.randn(6, 4)
    net.b = torch.jit.script(net.b)
    with torch.set_grad_enabled(grad):
        assert bp.record(net, x).route == [0, 1, 2]
        expected = copy.deepcopy(net).to(DEVICE)(x.to(DEVICE))
        pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=True)
        torch.testing.assert_close(pipe(x).cpu(), expected.cpu())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_module_that_begins_a_forward_and_draws():
    """Its random numbers are those of its stage; nothing in it is recomputed."""

    def forward(s, x):
        h = s.a(s.b(x))
        with B(1):
            return s.c(h)

    net = Scripted(forward)
    net.b = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3, checkpoint="always")
    assert pipe.verify(torch.randn(6, 4)).ok
    recording = bp.record(net, torch.randn(6, 4))
    assert [hop.draws for hop in recording.hops] == [{"torch"}, set()]
    assert "TorchScript" in recording.recomputable["b"].refuses


class Coupled(torch.autograd.Function):
    """One half of a reversible block: it runs its layer again in its backward."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x + layer(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (x + ctx.layer(x)).backward(g)
        return None, x.grad


def test_a_layer_inside_of_custom_functions_on_two_stages():
    """Their backwards would both add to its gradients; on one stage they may."""

    def forward(s, x, other=1):
        with B(0):
            h = Coupled.apply(s.a, s.b(x))
        with B(1):
            return s.c(Coupled.apply(s.a, h) if other else h)

    found(forward, CrossingError, "'Coupled' on stage 1 reads parameter 'a.weight' of stage 0")
    if not is_simulated():  # the layer is on one device
        check_alike(Scripted(forward), torch.randn(6, 4), schedule="uncut")
    net = Scripted(lambda s, x: forward(s, x, other=0))
    recording = bp.record(net, torch.randn(6, 4))
    assert {held.name: held.hop for held in recording.parameters}["a.weight"] == 0
    check_alike(net, torch.randn(6, 4))


def test_parameter_written_on_another_stage():
    """One stage owns it."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            with torch.no_grad():
                s.a.bias.add_(1)
            return s.b(h)

    found(forward, StateError, "'a.bias' of shape .* lives on stage 0 and was written")


def test_buffer_written_on_one_stage_and_read_on_another():
    """Micro-batches under way at once would mix in it."""

    class Counting(Scripted):
        def __init__(self, forward):
            super().__init__(forward)
            self.register_buffer("seen", torch.zeros(()))

    def forward(s, x):
        with B(0):
            h = s.a(x)
            s.seen.add_(1)
        with B(1):
            return s.b(h) * s.seen

    pipe = bp.Pipeline(Counting(forward), devices=stages(2), chunks=3)
    with pytest.raises(StateError, match=r"buffer 'seen' is written .* on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(6, 4), loss_fn=torch.sum)


@pytest.mark.cpu("apply_ is for tensors on the CPU")
def test_a_buffer_written_by_a_function_of_pythons_and_read_on_another_stage():
    """``apply_`` writes, and torch counts no write."""

    class Counting(Scripted):
        def __init__(self, forward):
            super().__init__(forward)
            self.register_buffer("scale", torch.ones(4))

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            s.scale.apply_(lambda value: value * 1.5)
            h = s.b(h)
        with B(0):
            return h * s.scale

    pipe = bp.Pipeline(Counting(forward), devices=stages(2), chunks=3)
    with pytest.raises(StateError, match=r"buffer 'scale' is written .* on hops \[1, 2\]"):
        pipe.forward_backward(torch.randn(6, 4), loss_fn=torch.sum)


def test_an_input_that_each_micro_batch_writes_in_place():
    """A write to one slice of the batch is none to the others, which graphs have saved."""

    def forward(s, x):
        with B(0):
            h = s.a(x.add_(1))
        with B(1):
            return s.b(h)

    net = Scripted(forward)
    plain = copy.deepcopy(net)
    x = torch.randn(6, 4)
    expected = plain_step(plain, (x.clone(),), {}, None, square, 3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule="gpipe")
    there = x.to(stages(1)[0], copy=True)
    loss = pipe.forward_backward(there, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same
