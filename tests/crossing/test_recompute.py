"""Recomputation: the same numbers from fewer activations."""

import copy
import dataclasses
import gc
import random
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.crossing import recompute as checkpoints
from blockpipe.crossing.recompute import Recomputable
from blockpipe.devices import digests
from blockpipe.errors import CrossingError, PlanError, StateError, UsageError

from ..models import SCHEDULES, square
from ..parity import difference, plain_step
from ..stage_devices import equal, examples, stages
from ..strategies import Program, programs

MODES = ["never", "except_last", "always"]


class Layer(nn.Module):
    """A residual layer that saves much more than its input."""

    def __init__(self, width, p=0.0):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)
        self.calls = []

    def forward(self, x):
        self.calls.append(bp.is_recomputing())
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x)))))


def layers(p=0.0, **marks):
    net = nn.Sequential(nn.Linear(16, 8), *(Layer(8, p) for _ in range(5)), nn.Linear(8, 2))
    net[3] = bp.BeginBlock(net[3], stage=1, **marks)
    net[5] = bp.BeginBlock(net[5], stage=2)
    return net


def cubed(output):
    return output.pow(3).mean()


def step(net, x, steps=1, **options):
    pipe = bp.Pipeline(net, devices=stages(3), **{"chunks": 4, **options})
    for _ in range(steps):
        loss = pipe.forward_backward(x, loss_fn=square).loss
    return pipe, loss


def again(net):
    """For each layer how often it ran for the second time."""
    return [sum(layer.calls) for layer in net if isinstance(layer, Layer)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("isolate", [False, True])
def test_gradients_and_statistics_are_those_without(mode, schedule, p, isolate):
    """For each mode and schedule, with dropout and batch norm, over two steps: to the bit."""
    first = layers(p)
    other = copy.deepcopy(first)
    x = torch.randn(11, 16)
    torch.manual_seed(3)
    _, expected = step(first, x, steps=2, schedule="sequential")
    after = torch.rand(3)
    torch.manual_seed(3)
    _, loss = step(other, x, steps=2, schedule=schedule, checkpoint=mode, isolate=isolate)
    assert difference(other, first, loss, expected).same
    assert equal(torch.rand(3), after)


@pytest.mark.parametrize(("mode", "times"), [("never", 0), ("except_last", 3), ("always", 4)])
def test_how_often_layers_run_again(mode, times):
    """Counted on the micro-batches that there are."""
    net = layers()
    step(net, torch.randn(8, 16), checkpoint=mode)
    assert again(net) == [times] * 5


def test_except_last_counts_the_microbatches_there_are():
    """Two samples make two micro-batches, whatever was asked for; the last is not recomputed."""
    net = layers()
    pipe = bp.Pipeline(net.eval(), devices=stages(3), chunks=4, checkpoint="except_last")
    pipe.forward_backward(torch.randn(2, 16), loss_fn=square)
    assert again(net) == [1] * 5


@pytest.mark.parametrize(
    ("mark", "mode", "times"),
    [(True, "never", [0, 0, 4, 4, 0]), (False, "always", [4, 4, 0, 0, 4])],
)
def test_a_mark_decides_for_its_block(mark, mode, times):
    """checkpoint= of a mark overrides the pipeline's, until the next mark."""
    net = layers(checkpoint=mark)
    plain = copy.deepcopy(net)
    x = torch.randn(8, 16)
    _, loss = step(net, x, checkpoint=mode)
    assert again(net) == times
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


def test_a_mark_holds_to_the_end_of_its_block():
    """With Block too; the inner block's ends with it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(8) for _ in range(4))

        def forward(self, x):
            with bp.Block(0, checkpoint=True):
                x = self.layers[0](x)
                with bp.Block(1, checkpoint=False):
                    x = self.layers[1](x)
                x = self.layers[2](x)
            return self.layers[3](x)

    net = Net()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    assert [sum(layer.calls) for layer in net.layers] == [2, 0, 2, 0]


def test_a_mark_with_a_wrong_checkpoint_is_refused():
    """As soon as it is written."""
    with pytest.raises(
        bp.BlockpipeError, match=r"True, False, or None .*for checkpoint, got 'always'"
    ):
        bp.Block(0, checkpoint="always")


def test_an_unknown_mode_is_refused():
    """With those that there are."""
    with pytest.raises(
        TypeError, match=r"'never', 'except_last', 'always' for checkpoint, got 'sometimes'"
    ):
        bp.Pipeline(layers(), checkpoint="sometimes")


def test_the_schedule_has_the_recomputation_before_its_backward():
    """An R right before each B that needs one, and no other."""
    pipe, _ = step(layers(), torch.randn(8, 16), checkpoint="except_last")
    made = next(iter(pipe._preparer.known.values())).schedule("1f1b", 4)
    lane = [str(action) for action in made.lanes[0]]
    assert lane[:5] == ["F0.0", "F0.1", "F0.2", "R0.0", "B0.0"]
    assert lane[-1] == "B0.3"
    assert "R0.3" not in lane


def test_recomputation_starts_before_the_gradient_arrives():
    """The first stage's is done while the second stage's backward waits for it."""
    order = []

    class Watched(Layer):
        def forward(self, x):
            if bp.is_recomputing():
                order.append("recomputed")
            return super().forward(x)

    class Last(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad and bp.current_microbatch() == 0:
                y.register_hook(self.wait)
            return y

        def wait(self, gradient):
            for _ in range(200):
                if order:
                    break
                torch.randn(1000).sort()
            order.append("backward")
            return gradient

    net = nn.Sequential(Watched(8), Last(8, 8))
    net[1] = bp.BeginBlock(net[1], stage=1, checkpoint=False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    assert order[0] == "recomputed"


class Spectral(nn.Module):
    """Reads and writes buffers in its forward: by spectral norm, and by an EMA of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("replaced", torch.ones(6))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.abs().mean(0))
        self.replaced = self.replaced * 0.5 + x.detach().mean(0)
        return self.down((self.up(self.layer(x) / self.scale) + self.replaced.sum()).tanh())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_are_as_if_it_ran_once(schedule):
    """Those that are read and written, in place or by assignment, too."""
    net = nn.Sequential(Spectral(), bp.BeginBlock(Spectral(), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint="always")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


class Writer(nn.Module):
    """Writes to its input, in place, and saves much."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x, more=None):
        x.relu_()
        y = self.down(self.up(x).tanh().exp().sin())
        return y if more is None else y + more["mask"] + more["scale"]


class Then(nn.Module):
    """Saves much, but not its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(self.up(x.exp()).sin().tanh())


class Writes(nn.Module):
    """Inputs that are written: inside of the module, and by the glue after it."""

    def __init__(self):
        super().__init__()
        self.first, self.writer, self.then = nn.Linear(6, 6), Writer(), Then()

    def forward(self, x, mask):
        with bp.Block(0):
            x = self.first(x)
            more = {"mask": mask, "scale": 2, "nothing": None}
            y = self.writer(x, more=more)
        with bp.Block(1):
            z = self.then(y)
            y.add_(1.0)
            return z * y


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_that_are_written_are_kept(schedule):
    """With integer, missing and no-grad members beside them."""
    net = Writes()
    plain = copy.deepcopy(net)
    x, mask = torch.randn(8, 6), torch.randint(0, 2, (8, 6))
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=4, schedule=schedule, checkpoint="always", isolate=True
    )
    loss = pipe.forward_backward(x, mask, loss_fn=square).loss
    expected = plain_step(plain, (x, mask), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


def test_a_write_that_was_not_recorded_is_an_error():
    """It names the module, and what to do."""

    class Sometimes(Writer):
        writes = bytearray(1)  # whose content nobody compares

        def forward(self, x):
            return super().forward(x if self.writes[0] else x.clone())

    net = nn.Sequential(nn.Linear(6, 6), Sometimes(), bp.BeginBlock(nn.Linear(6, 6), stage=1))
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=2, checkpoint="always", sample=(torch.randn(4, 6),)
    )
    Sometimes.writes[0] = 1
    with pytest.raises(
        bp.BlockpipeError, match=r"written in place by module '1'.*checkpoint=False"
    ):
        pipe.forward_backward(torch.randn(4, 6), loss_fn=square)


def test_what_depends_on_something_else_is_an_error():
    """A module that saves other things when it runs again is named."""

    class Counting(Layer):
        def forward(self, x):
            return super().forward(torch.cat([x, x]) if bp.is_recomputing() else x)[: len(x)]

    net = nn.Sequential(Counting(8), bp.BeginBlock(nn.Linear(8, 8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    with pytest.raises(bp.BlockpipeError, match=r"module '0' on stage 0 saved .*is_recomputing"):
        pipe.forward_backward(torch.randn(4, 8), loss_fn=square)


def test_arguments_that_are_one_tensor_stay_one():
    """Attention asks whether query, key and value are the same object, and computes otherwise."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            with bp.Block(1):
                return self.attention(x, x, x, need_weights=False)[0]

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 5, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always", isolate=True)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 4)).same


@pytest.mark.slow
@pytest.mark.cpu("it is the CPU's autocast")
def test_a_recomputation_is_under_the_forwards_autocast():
    """The caller's, and what the forward enters around a call."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(8), Layer(8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                x = self.a(x)
            with bp.Block(1):
                return self.b(x)

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 8)
    for inline in (False, True):
        net.zero_grad(), plain.zero_grad()
        schedule = "sequential" if inline else "1f1b"
        pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always", schedule=schedule)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = pipe.forward_backward(x, loss_fn=square).loss
            plain_loss = torch.zeros(())
            for part in x.chunk(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    one = square(plain(part)) / 2
                with torch.autocast("cpu", enabled=False):
                    one.backward()
                plain_loss += one.detach()
        assert difference(net, plain, loss, plain_loss).same


@bp.BlockFunction(stage=1)
def head(layer, x, factor=1.0):
    """Saves intermediate results; a function as a block."""
    head.calls.append(bp.is_recomputing())
    return F.layer_norm(layer(x).exp().sin().tanh() * factor, (6,))


def test_a_block_function_is_recomputed_as_a_whole():
    """As a module is; its gradients are the plain loop's."""
    head.__wrapped__.calls = head.calls = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return head(self.last, self.first(x), factor=2.0)

    net = Net()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always", isolate=True)
    loss = pipe.forward_backward(x, loss_fn=cubed).loss  # the squares have a constant mean here
    assert sum(head.calls) == 4
    assert list(pipe.recording.sealed_functions.values()) == [frozenset({1})]
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, cubed, 4)).same


class Inner(nn.Module):
    """``torch.utils.checkpoint`` in a module, and in glue around a module."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(8, 8)
        self.layer, self.other = Layer(8, 0.3), Layer(8, 0.3)
        self.inner = Inside(reentrant)

    def forward(self, x):
        with bp.Block(0):
            x = self.inner(self.first(x))
        with bp.Block(1):
            y = checkpoint(self.layer, x, use_reentrant=False)
            return self.other(y) + x


class Inside(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layer = Layer(8, 0.3)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant).sin()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_torchs_own_checkpoint_goes_on_working(schedule, reentrant, mode):
    """In sealed modules and in glue, with dropout. (Batch norm counts twice there, plain too.)"""
    net = Inner(reentrant)
    for layer in (net.layer, net.other, net.inner.layer):
        layer.norm = nn.LayerNorm(8)
    other = copy.deepcopy(net)
    x = torch.randn(8, 8)
    losses = []
    for model, options in (
        (net, {"schedule": "sequential"}),
        (other, {"schedule": schedule, "checkpoint": mode}),
    ):
        torch.manual_seed(1)
        pipe = bp.Pipeline(model, devices=stages(2), chunks=4, **options)
        losses.append(pipe.forward_backward(x, loss_fn=square).loss)
    assert difference(other, net, losses[1], losses[0]).same


@pytest.mark.parametrize("mode", MODES)
def test_a_differentiable_call_recomputes_too(mode):
    """pipe(x), and the caller's own backward."""
    net = layers(0.2)
    other = copy.deepcopy(net)
    x = torch.randn(8, 16)
    torch.manual_seed(0)
    _, expected = step(net, x, schedule="sequential")
    torch.manual_seed(0)
    pipe = bp.Pipeline(other, devices=stages(3), chunks=4, checkpoint=mode)
    loss = square(pipe(x))
    loss.backward()
    assert difference(other, net, loss.detach(), expected).gradients < 1e-6
    assert again(other) == [{"never": 0, "except_last": 3, "always": 4}[mode]] * 5


@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_one_ordinary_graph_recomputes_when_it_is_asked(mode):
    """Uncut: second backwards and higher derivatives too, each recomputed anew."""
    net = layers(0.2)
    other = copy.deepcopy(net)
    x = torch.randn(8, 16)
    results = []
    for model, checkpoint_ in ((net, "never"), (other, mode)):
        torch.manual_seed(0)
        pipe = bp.Pipeline(
            model, devices=stages(3), chunks=4, schedule="uncut", checkpoint=checkpoint_
        )
        loss = square(pipe(x))
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(loss.detach())
    assert difference(other, net, results[1], results[0]).same
    times = {"except_last": 3, "always": 4}[mode]
    assert again(other) == [2 * times] * 5


def test_nothing_is_recomputed_without_gradients():
    """Under no_grad, and in what is frozen."""
    net = layers()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, checkpoint="always")
    with torch.no_grad():
        pipe(torch.randn(8, 16))
    assert again(net) == [0] * 5
    for parameter in net[:3].parameters():
        parameter.requires_grad_(False)
    pipe.forward_backward(torch.randn(8, 16), loss_fn=square)
    assert again(net) == [0, 0, 4, 4, 4]


def test_what_would_gain_nothing_is_not_run_again():
    """A linear layer saves its input alone, which would have to be kept anyway."""
    pipe, _ = step(layers(), torch.randn(8, 16), checkpoint="always")
    about = pipe.recording.recomputable
    assert [about[path].pays for path in ("0", "6")] == [False, False]
    assert all(about[str(i)].pays for i in range(1, 6))


def test_a_generator_of_ones_own_is_not_run_again():
    """Nobody knows its state: the module keeps its activations instead."""

    class Own(Layer):
        generator = torch.Generator()

        def forward(self, x):
            return super().forward(x) * torch.rand(8, generator=self.generator).to(x.device)

    net = nn.Sequential(Own(8), bp.BeginBlock(Layer(8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
    assert again(net) == [0, 2]
    assert "0 is not recomputed: it draws from a generator of its own" in str(pipe.summary())


def test_torch_func_inside_is_not_run_again():
    """It bears no saved-tensor hooks: the module keeps its activations instead."""

    class Func(Layer):
        def forward(self, x):
            slopes = torch.func.vmap(torch.func.grad(lambda v: v.square().sum()))(x)
            return super().forward(x) + slopes

    net = nn.Sequential(Func(8), bp.BeginBlock(Layer(8), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(4, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert again(net) == [0, 2]
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 2)).same


def test_an_inner_gradient_in_a_recomputed_module():
    """A module that differentiates in its forward (a force field) does so twice."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 1)

        def forward(self, x):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                energy = self.b(self.a(at).tanh().sin()).sum()
                force = torch.autograd.grad(energy, at, create_graph=True)[0]
            return x + force

    net = nn.Sequential(Force(), bp.BeginBlock(Force(), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(4, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 2)).same


def test_hooks_on_parameters_fire_once():
    """With the sum, as in the plain loop."""
    net = layers()
    calls = []
    net[1].a.weight.register_hook(lambda g: calls.append(g.clone()))
    step(net, torch.randn(8, 16), checkpoint="always")
    assert len(calls) == 4


def test_current_stage_and_microbatch_are_known_again():
    """While a module runs for the second time."""
    seen = []

    class Asking(Layer):
        def forward(self, x):
            if bp.is_recomputing():
                seen.append((bp.current_stage(), bp.current_microbatch()))
            return super().forward(x)

    net = nn.Sequential(nn.Linear(8, 8), bp.BeginBlock(Asking(8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
    assert sorted(seen) == [(1, 0), (1, 1)]
    assert not bp.is_recomputing()


def test_a_failure_in_a_recomputation_is_told():
    """With its own traceback and a note; the next step works."""

    class Fails(Layer):
        fails = True

        def forward(self, x):
            if self.fails and bp.is_recomputing():
                raise KeyError("the second time")
            return super().forward(x)

    net = nn.Sequential(nn.Linear(8, 8), bp.BeginBlock(Fails(8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    x = torch.randn(4, 8)
    with pytest.raises(KeyError, match="the second time") as caught:
        pipe.forward_backward(x, loss_fn=square)
    (note,) = caught.value.__notes__
    assert "in the recomputation of micro-batch 0 on stage 1" in note
    assert note.endswith("exclude it from recomputation with checkpoint=False")
    Fails.fails = False
    pipe.forward_backward(x, loss_fn=square)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_activation_outlives_its_step(schedule):
    """No activation outlives its step, with the collector off."""
    seen = []

    class Noting(Layer):
        def forward(self, x):
            y = super().forward(x)
            seen.append(weakref.ref(y))
            seen.append(weakref.ref(y.untyped_storage()))
            return y

    net = nn.Sequential(nn.Linear(8, 8), Noting(8), bp.BeginBlock(Noting(8), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always", schedule=schedule)
    gc.collect()
    gc.disable()
    try:
        pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
        assert len(seen) >= 2 * 2 * 4  # two refs, two layers, four micro-batches
        assert [ref for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


def test_the_summary_says_what_glue_keeps():
    """CrossingMode is never recomputed: how much that is stands in the notes."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(8), Layer(8)

        def forward(self, x):
            with bp.Block(0):
                x = self.a(x).exp().sin()
            with bp.Block(1):
                return self.b(x)

    net = Net()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
    hop = pipe.recording.hops[0]
    assert hop.glue_bytes == 4 * 8 * 4  # exp's result, which sin saves too, of four rows
    assert "recomputation: glue keeps 128 B a micro-batch on stage 0" in str(pipe.summary())


class Wide(nn.Module):
    """Saves much; what it does besides is the test's, before or in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, *more):
        return self.down(self.up(x).tanh().exp().sin())


def compared(net, x, schedule="1f1b", steps=2, mode="always", **options):
    """Whether a step that recomputes is one that does not; what ran, too."""
    results = []
    for model, settings_ in (
        (copy.deepcopy(net), {"schedule": "sequential"}),
        (net, {"schedule": schedule, "checkpoint": mode, **options}),
    ):
        torch.manual_seed(0)
        count = bp.record(model, x).num_stages
        pipe = bp.Pipeline(model, devices=stages(count), chunks=4, **settings_)
        for _ in range(steps):
            loss = pipe.forward_backward(x, loss_fn=square).loss
        results.append((model, loss))
    (plain, expected), (model, loss) = results
    return difference(model, plain, loss, expected).same, pipe


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_of_others_are_as_if_it_ran_once(schedule):
    """Those that a block function uses itself, and a child's that its parent holds."""

    class Child(Wide):
        def forward(self, x):
            with torch.no_grad():
                self.parent[0].scale.mul_(0.9).add_(x.abs().mean())
            return super().forward(x / self.parent[0].scale)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.child = Wide(), nn.Linear(8, 8), Child()
            self.register_buffer("ema", torch.ones(8))
            self.register_buffer("scale", torch.ones(()))
            self.norm = nn.BatchNorm1d(8)
            self.child.parent = [self]

        @bp.BlockFunction(stage=0)
        def features(self, x):
            with torch.no_grad():
                self.ema.mul_(0.9).add_(x.abs().mean(0))
            x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
            return self.first(x / self.ema)

        def forward(self, x):
            x = self.features(x)
            with bp.Block(1):
                return self.child(self.second(x))

    exact, pipe = compared(Net(), torch.randn(16, 8), schedule)
    assert exact
    assert all(about.pays for path, about in pipe.recording.recomputable.items() if "feat" in path)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_call_reads_besides_its_arguments_stays(schedule):
    """A tensor that the glue puts on the module is another one when the call would run again."""

    class Masked(Wide):
        def forward(self, x):
            return super().forward(x * self.mask)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.masked, self.last = Masked(), nn.Linear(8, 8)

        def forward(self, x):
            self.masked.mask = (x > 0).float()
            x = self.masked(x)
            self.masked.mask = None
            with bp.Block(1):
                return self.last(x)

    exact, pipe = compared(Net(), torch.randn(16, 8), schedule)
    assert exact
    assert "not given" in pipe.recording.recomputable["masked"].refuses


class Attribute(Wide):
    def __init__(self):
        super().__init__()
        self.seen = torch.ones(8)  # no buffer

    def forward(self, x, _):
        self.seen.mul_(0.9).add_(x.detach().abs().mean(0).to(self.seen.device))
        return super().forward(x / self.seen.to(x.device))


class Normalizes(Wide):
    def forward(self, x, _):
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm())
        return super().forward(x)


class Aliased(Wide):
    def forward(self, x, y):
        x.relu_()
        return super().forward(y) + x


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Attribute, "no argument and no buffer"),
        (Normalizes, "no argument and no buffer"),
        (Aliased, "arguments that share memory"),
    ],
)
def test_what_writes_elsewhere_is_not_run_again(module, why):
    """To an attribute, to a parameter, or through two arguments: it keeps its activations."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(8, 8), module(), Wide()

        def forward(self, x):
            x = self.first(x)
            x = self.inner(x, x.view_as(x))
            with bp.Block(1):
                return self.last(x)

    net = Net()
    exact, pipe = compared(net, torch.randn(16, 8), "sequential")
    assert exact
    assert any(why in (about.refuses or "") for about in pipe.recording.recomputable.values())


@dataclasses.dataclass
class State:
    n: int
    seen: list


@pytest.mark.parametrize("make", [lambda: State(0, []), lambda: SimpleNamespace(n=0, seen=[])])
def test_arguments_that_are_changed_are_as_they_were(make):
    """Objects of the user's, lists inside of them: opened before the call, and before each rerun."""

    class Changes(Wide):
        def forward(self, x, state):
            state.n += 1
            state.seen.append(x.detach())
            return super().forward(x * state.n) * len(state.seen)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Changes(), Changes()

        def forward(self, x):
            state = make()
            x = self.a(x, state)
            with bp.Block(1):
                return self.b(x, state)

    assert compared(Net(), torch.randn(16, 8), "gpipe")[0]


def test_a_module_that_counts_is_found_in_the_first_step():
    """Python state that its result depends on is nothing that anybody sees: the values are."""

    class Counts(Wide):
        n = 0

        def forward(self, x):
            self.n += 1
            return super().forward(x * self.n)

    net = nn.Sequential(Counts(), bp.BeginBlock(Wide(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always")
    with pytest.raises(bp.BlockpipeError, match=r"'0' on stage 0 .*with other numbers when it was"):
        pipe.forward_backward(torch.randn(16, 8), loss_fn=square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(64,), (16, 4), (4, 16), (2, 3, 8)])
def test_a_digest_tells_orders_apart(dtype, shape):
    """A permutation has the same sum and norm; one other element of many is seen too."""
    if dtype == torch.bool:
        tensor = (
            F.one_hot(torch.randperm(shape[-1]))[: shape[0]].bool()
            if len(shape) == 2
            else (torch.rand(shape) > 0.5)
        )
    elif dtype == torch.int64:
        tensor = torch.randint(100, shape)
    else:
        tensor = F.layer_norm(torch.randn(shape), shape[-1:]).to(dtype)  # all rows have one sum
    agree, digest = digests.agree, digests.Comparisons().digest
    assert agree(digest(tensor), digest(tensor.clone()))
    for dim, size in enumerate(shape):
        moved = tensor.roll(1, dim)
        if size > 1 and not equal(moved, tensor):
            assert not agree(digest(tensor), digest(moved))
    one = tensor.clone()
    one.view(-1)[3] = ~one.view(-1)[3] if dtype == torch.bool else one.view(-1)[3] + 1
    assert not agree(digest(tensor), digest(one))


def test_a_shuffle_of_its_own_is_found_in_the_first_step():
    """What is saved is the same but for its order, the shuffle itself too."""

    class Shuffles(Wide):
        rng = random.Random(0)

        def forward(self, x):
            return super().forward(x.sigmoid()[self.rng.sample(range(len(x)), len(x))])

    net = nn.Sequential(nn.Linear(8, 8), Shuffles(), bp.BeginBlock(Wide(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    with pytest.raises(StateError, match=r"'1' on stage 0 .*with other numbers when it was"):
        pipe.forward_backward(torch.randn(64, 8), loss_fn=square)


class Reentrant(Wide):
    """Its statistics are read and written inside of an autograd function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, x):
        run = lambda x: super(Reentrant, self).forward(self.norm(x))  # noqa: E731
        y = checkpoint(run, x, use_reentrant=True)
        return y.tanh() * y.sigmoid()


class Appears(Wide):
    """A buffer that is None until the first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x):
        self.seen = torch.ones(()) if self.seen is None else self.seen.add_(1)
        return super().forward(x) / self.seen.clone()


@pytest.mark.parametrize("module", [Reentrant, Appears])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_that_no_operation_of_the_glue_reads(module, schedule):
    """They are as if it had run once, too."""
    net = nn.Sequential(nn.Linear(8, 8), module(), bp.BeginBlock(module(), stage=1))
    x, results = torch.randn(16, 8), []
    for mode in ("never", "always"):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(model, devices=stages(2), chunks=4, schedule=schedule, checkpoint=mode)
        results += [(model, pipe.forward_backward(x, loss_fn=square).loss) for _ in range(2)][1:]
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same
    assert pipe.recording.recomputable["1"].is_recomputed


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_dropout_that_begins_later(schedule, mode):
    """It drew nothing when the model was recorded; from its second step on it is as any other."""
    results = []
    x = torch.randn(16, 8)
    net = nn.Sequential(Layer(8), bp.BeginBlock(Layer(8), stage=1))
    for options in ({"schedule": "sequential"}, {"schedule": schedule, "checkpoint": mode}):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(model, devices=stages(2), chunks=4, **options)
        pipe.forward_backward(x, loss_fn=square)
        for layer in model:
            layer.drop.p = 0.5
        pipe.forward_backward(x, loss_fn=square)  # noticed
        model.load_state_dict(net.state_dict())
        model.zero_grad()
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same


@pytest.mark.parametrize("mode", MODES[1:])
def test_dropout_that_begins_later_is_replayed_at_once(mode):
    """In that very step, too, what is made again has the masks that it had."""
    net = nn.Sequential(Layer(8), bp.BeginBlock(Layer(8), stage=1))
    x = torch.randn(16, 8)
    results = []
    for checkpoint_ in ("never", mode):
        model = copy.deepcopy(net)
        pipe = bp.Pipeline(
            model, devices=stages(2), chunks=4, schedule="sequential", checkpoint=checkpoint_
        )
        pipe.forward_backward(x, loss_fn=square)
        for layer in model:
            layer.drop.p = 0.5
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    assert difference(results[1][0], results[0][0], results[1][1], results[0][1]).same


def test_drawing_that_no_attribute_tells_of_is_replayed_at_once():
    """No recording says that it draws: what is made again finds the device's generator all the
    same."""
    rate = [0.0]

    class Draws(nn.Linear):
        def forward(self, x):
            x = super().forward(x).tanh()
            return F.dropout(x, rate[0]) if rate[0] else x

    net = nn.Sequential(Draws(8, 8), bp.BeginBlock(Draws(8, 8), stage=1))
    x, results = torch.randn(8, 8), []
    for mode in ("never", "always"):
        model, rate[0] = copy.deepcopy(net), 0.0
        options = {"schedule": "sequential", "checkpoint": mode}
        pipe = bp.Pipeline(model, devices=stages(2), chunks=2, **options)
        pipe.forward_backward(x, loss_fn=square)
        rate[0] = 0.5
        torch.manual_seed(0)
        results.append((model, pipe.forward_backward(x, loss_fn=square).loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same


@pytest.mark.slow
def test_a_function_that_reads_what_it_saved_twice():
    """Costs no second recomputation."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            assert ctx.saved_tensors is not None
            return gradient * ctx.saved_tensors[1]

    class Custom(Layer):
        def forward(self, x):
            for _ in range(4):
                x = Twice.apply(super().forward(x) * 0.1)
            return x

    net = nn.Sequential(Custom(8), bp.BeginBlock(Custom(8), stage=1))
    for layer in net:
        layer.norm = nn.LayerNorm(8)
    exact, _ = compared(net, torch.randn(16, 8), steps=1)
    assert exact
    assert [sum(layer.calls) / 4 for layer in net] == [4, 4]


def test_an_inner_gradient_leaves_nothing_behind():
    """R makes all of it again, although a part was read in the forward."""
    runs = []

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 1)

        def forward(self, x):
            runs.append(bp.is_recomputing())
            at = x.detach().requires_grad_()
            energy = self.b(self.a(at).tanh().sin()).sum()
            return x + torch.autograd.grad(energy, at, create_graph=True)[0]

    net = nn.Sequential(Force(), bp.BeginBlock(Force(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint="always")
    pipe.forward_backward(torch.randn(4, 8), loss_fn=square)
    inner = 4  # each forward asks for its own gradient, which makes what it saved again
    assert sum(runs) == 4 + inner


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_a_first_module_that_writes_to_its_input(schedule, mode):
    """Micro-batches are slices of one batch: a write to one is none to the others."""

    class Scales(Wide):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    net = nn.Sequential(Scales(), bp.BeginBlock(Wide(), stage=1))
    plain = copy.deepcopy(net)
    x = torch.randn(16, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint=mode)
    copied = x.clone()
    loss = pipe.forward_backward(x, loss_fn=square).loss
    expected = plain_step(plain, (copied,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


@settings(max_examples=examples(60), deadline=None)
@given(
    programs,
    st.integers(2, 4),
    st.sampled_from(SCHEDULES),
    st.sampled_from(["except_last", "always"]),
    st.booleans(),
)
def test_random_programs_recompute_to_plain_gradients(
    instructions, chunks, schedule, mode, isolate
):
    """Random programs over glue and modules have the plain loop's gradients."""
    torch.manual_seed(0)
    net = Program(instructions)
    plain = copy.deepcopy(net)
    x, index = torch.randn(8, 4), torch.randint(0, 4, (8,))

    def loss_fn(outputs):
        return sum(o.square().mean() for o in outputs)

    try:
        expected = plain_step(plain, (x.clone(), index), {}, None, loss_fn, chunks)
    except RuntimeError:
        assume(False)  # no program at all: what autograd needs is written in place
    try:
        count = bp.record(net, (x, index)).num_stages
        pipe = bp.Pipeline(
            net,
            devices=stages(count),
            chunks=chunks,
            schedule=schedule,
            checkpoint=mode,
            isolate=isolate,
        )
        loss = pipe.forward_backward(x, index, loss_fn=loss_fn).loss
    except (PlanError, CrossingError, StateError):
        # What is refused is refused without it, too.
        with pytest.raises((PlanError, CrossingError, StateError), match=":"):
            bp.Pipeline(
                Program(instructions),
                devices=stages(3),
                chunks=chunks,
                schedule=schedule,
                isolate=isolate,
            ).forward_backward(x, index, loss_fn=loss_fn)
        return
    assert difference(net, plain, loss, expected).same


class NoisyProgram(Program):
    """Draws random numbers in glue, and calls layers that do; batch norm where it can."""

    def __init__(self, instructions):
        super().__init__(instructions)
        self.noisy = nn.ModuleList(Layer(4, 0.4) for _ in range(4))
        for layer, norm in zip(self.noisy, self.norms, strict=True):
            layer.norm = norm

    def run(self, op, a, b, stage):
        if op.name in ("linear", "half"):
            return self.noisy[stage](a)  # a layer for each stage
        made = super().run(op, a, b, stage)
        return F.dropout(made, 0.3) if op.name in ("tanh", "mul") else made


@settings(max_examples=examples(60), deadline=None)
@given(
    programs,
    st.integers(2, 4),
    st.sampled_from(SCHEDULES),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_random_programs_that_draw_recompute_as_sequential(
    instructions, chunks, schedule, mode, isolate
):
    """With dropout and batch norm: as sequential, without recomputation."""
    results = []
    x, index = torch.randn(8, 4), torch.randint(0, 4, (8,))
    for options in ({}, {"schedule": schedule, "checkpoint": mode, "isolate": isolate}):
        torch.manual_seed(0)
        net = NoisyProgram(instructions)
        pipe = bp.Pipeline(
            net, **{"devices": stages(3), "chunks": chunks, "schedule": "sequential", **options}
        )
        try:
            for _ in range(2):
                loss = pipe.forward_backward(
                    x.clone(),
                    index,
                    loss_fn=lambda outputs: sum(o.square().mean() for o in outputs),
                ).loss
        except (PlanError, CrossingError, StateError, UsageError):
            assume(False)  # UsageError: no output needs grad
        except RuntimeError as error:
            assert "inplace" in str(error) or "in-place" in str(error)
            assume(False)
        results.append((net, loss))
    (first, expected), (other, loss) = results
    assert difference(other, first, loss, expected).same


def test_frames_are_made_where_it_recomputes_only(monkeypatch):
    """Never means never: not even the hooks are on."""
    made = []
    monkeypatch.setattr(
        checkpoints.RecomputedCall, "run", lambda self, args, kwargs: made.append(self) or 1 / 0
    )
    step(layers(), torch.randn(8, 16), checkpoint="never")
    assert not made


@pytest.mark.parametrize(
    "place", ["call", "argument", "buffer", "digest", "collect", "surroundings"]
)
def test_a_failure_in_a_recomputation_locks_nobody_out(place, monkeypatch):
    """Wherever it comes: another thread can run the call again, and gets what was saved."""
    net = nn.BatchNorm1d(8)
    wrong = []

    def function(x):
        if wrong == ["call"]:
            raise KeyboardInterrupt
        return net(x).exp()

    def fails(*_, **__):
        raise KeyboardInterrupt

    again = checkpoints.RecomputeSpec(
        "it",
        Recomputable(),
        [(net._buffers, "running_mean", True), (net._buffers, "running_var", True)],
    )
    comparisons = digests.Comparisons()
    x = torch.randn(4, 8)
    call = checkpoints.SealedCall(function, (x,), {})
    frame = checkpoints.RecomputedCall(again, call, [], comparisons=comparisons)
    y = frame.run((x,), {})
    mean = net.running_mean.clone()
    with monkeypatch.context() as patch:
        wrong.append(place)
        if place == "argument":
            patch.setattr(checkpoints._SavedArgument, "entered", fails)
        elif place == "buffer":
            patch.setattr(checkpoints, "_copy_of", fails)
        elif place == "digest":
            patch.setattr(comparisons, "digest", fails)
        elif place == "collect":
            patch.setattr(checkpoints.RecomputedCall, "collect", fails)
        elif place == "surroundings":
            patch.setattr(frame._surroundings, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            frame.recompute()
    wrong.clear()
    assert equal(net.running_mean, mean)
    thread = threading.Thread(target=frame.recompute, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    y.sum().backward()
    assert equal(net.weight.grad.isfinite(), torch.ones(8, dtype=torch.bool))


class Takes(nn.Linear):
    """Changes the set and the deque that it is given."""

    def forward(self, x, seen, left):
        factor = left.pop() if "here" not in seen else 7.0
        seen.add("here")
        return (super().forward(x) * factor).tanh()


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Takes(4, 4), Takes(4, 4)

    def forward(self, x):
        with bp.Block(0):
            x = self.a(x, set(), deque([2.0]))
        with bp.Block(1):
            return self.b(x, set(), deque([3.0]))


def assert_recomputes_as_plain(net):
    """Two steps of a model in two stages, everything recomputed."""
    plain, x = copy.deepcopy(net), torch.randn(6, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, checkpoint="always")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 3)
        assert difference(net, plain, loss, expected).same


def test_a_set_and_a_deque_are_given_again_as_they_were():
    """The recomputed call sees what the first one was given, not what that left."""
    assert_recomputes_as_plain(Gives())


class CleansUp(nn.Linear):
    """Saves a tensor more where it does not come to its end."""

    def forward(self, x):
        try:
            return super().forward(x).tanh()
        except BaseException:
            self.weight.exp()
            raise


def test_what_is_saved_after_the_last_tensor_that_is_needed():
    """Running again ends there; what cleans up behind it does no harm."""
    net = nn.Sequential(CleansUp(4, 4), CleansUp(4, 4))
    assert_recomputes_as_plain(bp.begin_blocks(net, {"1": 1}))
