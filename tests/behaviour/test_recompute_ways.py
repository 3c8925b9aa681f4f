"""Recomputation beside other ways to run a forward again, and what it leaves behind."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp

from ..models import SCHEDULES, square
from ..parameter_sets import every_pair
from ..parity import difference, plain_step
from ..stage_devices import assert_close, stages
from .recomputed_models import MODES, Layer, again, layers, step


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


@every_pair(
    schedule=SCHEDULES,
    reentrant=[False, True],
    mode=MODES,
)
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


def test_noise_that_is_drawn_after_it_was_saved_is_not_run_again():
    """A call stops at the last tensor that it saves: the noise was what lay in memory."""
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Tanh()), nn.Linear(8, 8))
    net[1] = bp.BeginBlock(net[1], stage=1)
    found, x = [], torch.randn(4, 8)
    for when in ("never", "always"):
        net.zero_grad()
        torch.manual_seed(0)
        pipe = bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint=when)
        for _ in range(2):
            pipe.forward_backward(x, loss_fn=square)
        found.append([p.grad.clone() for p in net.parameters()])
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert "saves its noise before" in pipe.recording.recomputable["0"].refuses


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
