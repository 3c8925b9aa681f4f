"""The crossing table: each row is handled, found at recording, or found at replay; never silent."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import CrossingError, PlanError, StateError

from ..alike import DEVICE, check_alike
from ..models import Scripted, square
from ..parity import assert_same_gradients, difference, plain_step
from ..stage_devices import assert_close, equal, is_simulated, stages

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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "uncut"])
@pytest.mark.parametrize("name", list(ROWS))
def test_a_handled_row_trains_as_plain(name, schedule):
    """The gradients, the loss and the outputs are the plain run's, isolated too."""
    for isolate in (False, True) if schedule != "uncut" else (False,):
        check_alike(Scripted(ROWS[name]), torch.randn(6, 4), schedule=schedule, isolate=isolate)


NEED_GRADIENTS = {
    "autograd_grad_within_a_stage",
    "metadata_without_a_copy",
    "tensor_hook_fires_once_with_the_sum",
}


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in NEED_GRADIENTS])
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


def found(forward, error, match):
    net = Scripted(forward)
    before = copy.deepcopy(net.state_dict())
    for isolate in (False, True):
        pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=isolate)
        with pytest.raises(error, match=match):
            pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
        net.zero_grad()
    assert all(equal(v, net.state_dict()[k]) for k, v in before.items())


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


class Residual(nn.Module):
    """A ResNet's block: one ReLU in place is called twice, and the sum is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.first(x)))
        side = self.side(x)
        out += side
        return self.relu(out)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("cuts", [{"relu": 1, "side": 2}, {"relu": 1}, {"side": 1}])
def test_a_stage_that_is_returned_to_after_writes_in_place_on_the_way(cuts, isolate):
    """The copies of one tensor along its way are no views of each other."""
    net = nn.Sequential(nn.Linear(4, 4), Residual())
    bp.begin_blocks(net, {f"1.{path}": stage for path, stage in cuts.items()})
    pipe = bp.Pipeline(net, devices=stages(1 + max(cuts.values())), chunks=2, isolate=isolate)
    assert pipe.verify(torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=F.mse_loss)


class Scaled(nn.Linear):
    """Reads an attribute of its argument, and sets one."""

    def forward(self, x):
        x.count = getattr(x, "count", 0) + 1
        return super().forward(x) * x.scale * x.count


def _attributes(net, x):
    with B(0):
        h = net.a(x)
        h.scale = 2.0
    with B(1):
        y = net.b(h)
        h.scale = 3.0
        y = y + net.b(h)
    with B(2):
        return net.c(y) * h.count + h * h.scale


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_attributes_of_a_tensor_cross_with_it(schedule):
    """A sealed module finds what was set on its argument, and what it sets is found."""
    net = Scripted(_attributes)
    net.b = Scaled(4, 4)
    for isolate in (False, True) if schedule != "uncut" else (False,):
        check_alike(net, torch.randn(6, 4), schedule=schedule, isolate=isolate)


class Writes(nn.Module):
    """Counts in an argument that goes whole, on one stage, and may read it on another."""

    def __init__(self, stage, reads):
        super().__init__()
        self.a, self.b, self.stage, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), stage, reads

    def forward(self, x, total):
        with B(0):
            x = self.a(x)
            if self.stage == 0:
                total.add_(x.detach().sum())
        with B(1):
            if self.stage == 1:
                total.add_(x.detach().sum())
            x = self.b(x)
            return x * total if self.reads else x


@pytest.mark.parametrize("schedule", ["gpipe", "sequential"])
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(("stage", "reads"), [(0, False), (0, True), (1, False), (1, True)])
def test_an_argument_that_goes_whole_is_written_in_place(
    stage, reads, isolate, schedule, monkeypatch
):
    """Right, the caller's tensor too, or refused with the reason."""
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_OPERATION", 0)
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_HOP", 0)
    net, x, total = Writes(stage, reads), torch.randn(6, 4), torch.zeros(4, device=DEVICE)
    plain, expected = copy.deepcopy(net).to(DEVICE), total.clone()
    outputs = torch.cat([plain(part, expected) for part in x.to(DEVICE).split(2)])
    options = {"chunks": 3, "schedule": schedule, "isolate": isolate}
    pipe = bp.Pipeline(net, devices=stages(2), batch_dims={"total": None}, **options)
    under_way_at_once = schedule == "gpipe" or is_simulated()  # there a copy may be
    is_read_elsewhere = reads or stage == 1  # as an input it is the first stage's
    is_a_copy = isolate or (stage == 1 and is_simulated())
    if is_a_copy or (under_way_at_once and is_read_elsewhere):
        with pytest.raises(
            StateError, match="goes whole to every micro-batch, and the forward writes"
        ):
            pipe(x, total)
        return
    torch.testing.assert_close(pipe(x, total).cpu(), outputs.cpu())
    torch.testing.assert_close(total.cpu(), expected.cpu())


class _BeginsLater(nn.Module):
    """Does something to a crossing in glue, once it is turned on."""

    def __init__(self, does) -> None:
        super().__init__()
        self.a, self.b, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does
        self.is_on = bytearray(1)  # whose content nobody compares

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            if self.is_on[0]:
                h = self.does(self, h) + h
            return self.b(h)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _checkpointed(net: _BeginsLater, h: Tensor, *, reentrant: bool) -> Tensor:
    return torch.utils.checkpoint.checkpoint(
        lambda h: net.b(h).tanh() * h, h, use_reentrant=reentrant
    )


LATER = [
    lambda net, h: _Squares.apply(h),
    lambda net, h: _checkpointed(net, h, reentrant=False),
]


@pytest.mark.parametrize("does", LATER)
@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"schedule": "zb-h1"}])
def test_a_custom_function_or_a_checkpoint_may_begin_later(does, options: dict[str, object]):
    """Its backward went over the cut, and came to a graph that was gone."""
    net = _BeginsLater(does)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    for step in range(4):
        net.is_on[0] = plain.is_on[0] = step >= 2
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, F.mse_loss, 4))
    assert_same_gradients(net, plain)


def test_a_reentrant_checkpoint_that_begins_later_is_refused():
    net = _BeginsLater(lambda net, h: _checkpointed(net, h, reentrant=True))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    net.is_on[0] = 1
    with pytest.raises(CrossingError, match=r"test_crossings\.py:\d+\); pass use_reentrant=False"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class _Transforms(nn.Module):
    """Computes by torch.func in a module of its own."""

    def __init__(self, transformed) -> None:
        super().__init__()
        self.inner, self.many, self.transformed = nn.Linear(4, 4), nn.Linear(4, 4), transformed

    def forward(self, h: Tensor) -> Tensor:
        return self.transformed(self, h)


TRANSFORMS = {
    "grad": lambda s, h: torch.func.grad(lambda z: s.inner(z).sin().sum())(h),
    "vmap": lambda s, h: torch.vmap(lambda z: s.inner(z).sin())(h),
    "vmap of weights": lambda s, h: torch.vmap(lambda w: (h @ w.diag()).tanh())(s.many.weight)[0],
    "jacobian": lambda s, h: torch.vmap(torch.func.jacrev(lambda z: s.inner(z).sin()))(h).sum(-1),
    "jvp": lambda s, h: torch.func.jvp(s.inner, (h,), (h.detach().cos(),))[1] * h,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.func.jvp itself
@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"checkpoint": "always"}])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_torch_func_transform_in_a_module_on_one_stage(transform, options):
    """Its layers were called with tensors that have no storage, its closure's tensors were copied
    inside of the transform, and its results came from nowhere: each of that failed."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(h) + s.c(h)

    net = Scripted(forward)
    net.b = _Transforms(TRANSFORMS[transform])
    plain = copy.deepcopy(net)
    x = torch.randn(6, 4)
    expected = plain_step(plain, (x,), {}, None, square, 3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, **options)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same


def test_tangents_do_not_cross():
    """They stayed behind, and the loss was another one without a word."""

    def forward(s, x):
        with forward_ad.dual_level():
            with B(0):
                h = s.a(forward_ad.make_dual(x, torch.ones_like(x))).tanh()
            with B(1):
                y, tangent = forward_ad.unpack_dual(s.b(h).sin())
                return y if tangent is None else y + tangent

    x = torch.randn(6, 4)
    for schedule in ("1f1b", "sequential"):
        pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=3, schedule=schedule)
        with pytest.raises(CrossingError, match=r"has a tangent .*test_crossings\.py:\d+.*'uncut'"):
            pipe.forward_backward(x, loss_fn=square)
    check_alike(Scripted(forward), x, schedule="uncut")


def test_levels_of_forward_mode_on_two_stages_take_turns():
    """There is one level for all threads: two micro-batches in it failed with torch's own error."""

    def slope(module, h):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(h, torch.ones_like(h))
            y, tangent = forward_ad.unpack_dual(module(dual).sin())
        return y + tangent

    def on_two(s, x):
        with B(0):
            h = slope(s.a, x)
        with B(1):
            return slope(s.b, h)

    def on_one(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return slope(s.b, h)

    x = torch.randn(6, 4)
    pipe = bp.Pipeline(Scripted(on_two), devices=stages(2), chunks=3)
    with pytest.raises(StateError, match=r"forward-mode AD.*on hops \[0, 1\].*'sequential'"):
        pipe.forward_backward(x, loss_fn=square)
    check_alike(Scripted(on_two), x, schedule="sequential")
    check_alike(Scripted(on_one), x)
