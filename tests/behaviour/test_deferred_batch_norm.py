"""Deferred batch norm in every way to run a step, and in models that people use."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError

from ..parameter_sets import every_pair
from ..parity import difference, plain_step
from ..preparation.batch_norm_models import (
    Body,
    Watch,
    assert_as_full_batch,
    deferred,
    loss_of,
    net,
)
from ..stage_devices import assert_close, equal, stages

# --- the ways through


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_differentiable_call_commits_at_its_end(schedule, grad):
    """``pipe(x)`` commits at its end, with gradients and without; its backward commits nothing."""
    x = torch.randn(7, 3, 5) + 50
    model = net()
    before = copy.deepcopy(model[0])
    pipe = deferred(model, {"2": 1}, chunks=3, schedule=schedule)
    with torch.set_grad_enabled(grad):
        output = pipe(x)
    assert_as_full_batch(model[0], before, x)
    if grad:
        loss_of(output).backward()
        assert_as_full_batch(model[0], before, x)
        assert model[0].weight.grad is not None


@pytest.mark.parametrize("marks", [{}, {"2": 1}])
def test_a_step_in_one_thread_is_deferred_too(marks):
    """The steps that run as the plain loop does are deferred too."""
    x = torch.randn(7, 3, 5)
    model = bp.begin_blocks(net(), marks)
    full = copy.deepcopy(model[0])
    devices = ["cpu:0"] * (len(marks) + 1)
    pipe = bp.Pipeline(model, devices=devices, chunks=3, deferred_batch_norm=True)
    for _ in range(3):
        pipe.forward_backward(x, loss_fn=loss_of)
        full(x)
    assert_close(model[0].running_var, full.running_var, rtol=1e-6, atol=0)
    assert int(model[2].num_batches_tracked) == 3


@pytest.mark.parametrize(
    ("recompute", "mark"),
    [("reentrant", "1"), ("not reentrant", "1"), ("not reentrant", "1.body.2")],
)
@pytest.mark.parametrize("schedule", ["1f1b", "uncut", "plain"])
def test_what_a_checkpoint_computes_again_counts_once(schedule, recompute, mark):
    """What a checkpoint in the model computes again in backward is not counted again: statistics
    equal those of a step without it, to the bit."""
    devices = ["cpu:0"] * 2 if schedule == "plain" else stages(2)
    schedule = "1f1b" if schedule == "plain" else schedule
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 4), Body(net(4), recompute), nn.Linear(4, 4))
    models = [first, copy.deepcopy(first)]
    models[1][1].recompute = ""
    x = torch.randn(8, 4)
    for model in models:
        bp.begin_blocks(model, {mark: 1})
        pipe = bp.Pipeline(
            model, devices=devices, chunks=3, schedule=schedule, deferred_batch_norm=True
        )
        for _ in range(2):
            pipe.forward_backward(x, loss_fn=loss_of)
    assert int(first[1].body[0].num_batches_tracked) == 2
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert equal(a, b)


class Renormalizing(nn.BatchNorm1d):
    """Normalizes by its running mean while it trains, as batch renormalization does."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        shift = self.running_mean.clone()
        return super().forward(x) + shift * x.tanh()


@every_pair(
    schedule=["1f1b", "gpipe", "zb-h1", "sequential", "uncut"],
    checkpoint=["except_last", "always"],
    kind=[nn.BatchNorm1d, Renormalizing],
)
def test_recomputation_reads_the_forwards_statistics(schedule, checkpoint, kind):
    """What is recomputed reads the statistics that its forward read: gradients and statistics are
    those without recomputation, to the bit."""
    torch.manual_seed(0)
    first = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), kind(4), nn.Tanh()) for _ in range(2)))
    models = [first, copy.deepcopy(first)]
    x = torch.randn(9, 4)
    for model, mode in zip(models, ("never", checkpoint), strict=True):
        pipe = deferred(model, {"1": 1}, chunks=3, schedule=schedule, checkpoint=mode)
        for _ in range(2):
            pipe.forward_backward(x, loss_fn=loss_of)
        assert any(c.is_recomputed for c in pipe.recording.calls)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert equal(a.grad, b.grad)
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert equal(a, b)


def test_a_later_backward_leaves_the_statistics():
    """The backward of ``pipe(x)`` computes again, and leaves the statistics as they are."""
    model = nn.Sequential(nn.Linear(4, 4), Body(net(4), "not reentrant"))
    pipe = deferred(model, {"1": 1}, chunks=2)
    output = pipe(torch.randn(8, 4))
    state = copy.deepcopy(model.state_dict())
    loss_of(output).backward()
    assert all(equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager"}])
@pytest.mark.cpu("no compiler makes code for it")
def test_compiled_modules_defer_their_statistics(options):
    """Compiled modules end their graphs at a batch norm, and its statistics are deferred."""
    torch.compiler.reset()
    x = torch.randn(8, 3, 5) + 1e4
    model = nn.Sequential(Body(net()), nn.BatchNorm1d(15))
    bp.begin_blocks(model, {"1": 1})
    full = copy.deepcopy(model[0].body[0])
    watch = Watch(model[1])
    pipe = bp.Pipeline(model, devices=stages(2), chunks=3, deferred_batch_norm=True)
    pipe.compile(**options)
    pipe.forward_backward(x, loss_fn=loss_of)
    watch.check()
    full(x)
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=loss_of)
        full(x)
    assert_close(model[0].body[0].running_mean, full.running_mean, rtol=1e-6, atol=0)
    assert_close(model[0].body[0].running_var, full.running_var, rtol=1e-6, atol=0)


@pytest.mark.cpu("no compiler makes code for it")
@pytest.mark.parametrize("in_place", [True, False])
def test_modules_compiled_by_the_user_defer_their_statistics(in_place):
    """A module that was compiled, and run, before the pipeline: its batch norms are deferred."""
    torch.compiler.reset()
    x = torch.randn(8, 3, 5) + 1e4
    model = nn.Sequential(nn.ReLU(), nn.Identity(), Body(net()))
    norm = model[2].body[0]
    before = copy.deepcopy(norm)
    if in_place:
        model[2].compile(backend="eager")
        norm.compile(backend="eager")
    else:
        model[2] = torch.compile(model[2], backend="eager")
    model(x)
    norm.reset_running_stats()
    pipe = deferred(model, {"1": 1}, chunks=3)
    pipe.forward_backward(x, loss_fn=loss_of)
    assert_as_full_batch(norm, before, x)
    model(x)  # between steps it is the user's own again
    assert int(norm.num_batches_tracked) == 2


def test_isolated_stages_keep_their_statistics():
    """The stage sanitizer finds no statistics on another stage than their module's."""
    x = torch.randn(9, 3, 5)
    model = net()
    before = copy.deepcopy(model[0])
    deferred(model, {"2": 1}, chunks=3, isolate=True).forward_backward(x, loss_fn=loss_of)
    assert_as_full_batch(model[0], before, x)


def test_other_methods_update_at_once():
    """``run()`` is no step: batch norm does there what it always does."""
    x = torch.randn(9, 3, 5)
    model = net()
    full = copy.deepcopy(model)
    pipe = deferred(model, {"2": 1}, chunks=3, sample=x)
    pipe.run(model.forward, x)
    full(x)
    for a, b in zip(model.buffers(), full.buffers(), strict=True):
        assert equal(a, b)


# --- models


class Shared(nn.Module):
    """One batch norm, called twice: on one hop, or on two hops of its stage."""

    def __init__(self, between: int) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3, momentum=0.4), nn.Linear(3, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            first = self.norm(x)
        with bp.Block(self.between):
            other = 3 * x
        with bp.Block(0):
            first = first + 0 * self.norm(other)
        with bp.Block(1):
            return self.last(first)


@pytest.mark.parametrize(
    ("between", "schedule"), [(0, "1f1b"), (0, "uncut"), (1, "sequential"), (1, "uncut")]
)
def test_two_calls_of_a_module_are_two_updates(between, schedule):
    """Two calls of one module are two updates, in their order."""
    x = torch.randn(9, 3) + 4
    model = Shared(between)
    full = copy.deepcopy(model)
    pipe = bp.Pipeline(
        model, devices=stages(2), chunks=3, schedule=schedule, deferred_batch_norm=True
    )
    pipe.forward_backward(x, loss_fn=loss_of)
    full(x)
    assert_close(model.norm.running_mean, full.norm.running_mean)
    assert_close(model.norm.running_var, full.norm.running_var, rtol=1e-6, atol=0)
    assert int(model.norm.num_batches_tracked) == 2


class ReadElsewhere(nn.Module):
    """A batch norm whose input and weight belong to other stages too: it is not sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            y = self.first(x) * self.norm.weight
        with bp.Block(1):
            return self.norm(y) + y


@pytest.mark.parametrize("isolate", [False, True])
def test_a_batch_norm_in_glue_is_deferred(isolate):
    """A batch norm in the glue is deferred too, and gradients are the plain loop's."""
    x = torch.randn(8, 3)
    model = ReadElsewhere()
    plain = copy.deepcopy(model)
    watch = None if isolate else Watch(model)
    pipe = bp.Pipeline(
        model, devices=stages(2), chunks=2, deferred_batch_norm=True, isolate=isolate
    )
    loss = pipe.forward_backward(x, loss_fn=loss_of).loss
    if watch is not None:
        watch.check()
    expected = plain_step(plain, (x,), {}, None, loss_of, 2)
    plain.load_state_dict(model.state_dict())
    assert difference(model, plain, loss, expected).same


@pytest.mark.slow
def test_every_layer_of_a_resnet_has_what_it_got():
    """torchvision's ResNet-18: every layer's statistics are those of all that it got."""
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(6, 3, 64, 64) + 100
    model = torchvision.models.resnet18(num_classes=5)
    plain, before = copy.deepcopy(model), copy.deepcopy(model.conv1)
    watch = Watch(model)
    pipe = deferred(model, {"layer2": 1, "layer3": 2}, chunks=4)
    loss = pipe.forward_backward(x, loss_fn=loss_of).loss
    watch.check()
    assert equal(before.weight, model.conv1.weight)
    expected = plain_step(plain, (x,), {}, None, loss_of, 4)
    plain.load_state_dict(model.state_dict())
    assert difference(model, plain, loss, expected).same


@pytest.mark.slow
def test_batch_norms_of_timm_are_deferred():
    """timm's BatchNormAct2d, with a forward of its own."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv3_small_050", num_classes=5)
    assert any(type(m).__name__ == "BatchNormAct2d" for m in model.modules())
    plain = copy.deepcopy(model)
    watch = Watch(model)
    x = torch.randn(5, 3, 64, 64)
    pipe = deferred(model, {"blocks.2": 1}, chunks=2)
    torch.manual_seed(1)
    loss = pipe.forward_backward(x, loss_fn=loss_of).loss
    watch.check()
    torch.manual_seed(1)
    expected = plain_step(plain, (x,), {}, None, loss_of, 2)
    plain.load_state_dict(model.state_dict())
    assert difference(model, plain, loss, expected).same


class Reassigning(nn.BatchNorm1d):
    """A subclass that makes new buffers instead of writing to the old ones."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean = 0.5 * self.running_mean + 0.5 * x.mean(0).detach()
        return x - x.mean(0)


def test_a_subclass_that_assigns_its_buffers_keeps_them():
    """The module's own buffers are put back, and get the statistics."""
    model = nn.Sequential(Reassigning(3, momentum=0.5), nn.Linear(3, 3))
    own = model[0].running_mean
    x = torch.randn(8, 3)
    pipe = bp.Pipeline(model, devices=["cpu"], chunks=2, deferred_batch_norm=True)
    pipe.forward_backward(x, loss_fn=loss_of)
    assert model[0].running_mean is own
    assert_close(own, 0.5 * x.mean(0))


class Sequences(nn.BatchNorm1d):
    """Takes ``[batch, time, channels]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Clamped(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-0.5, 0.5))


class Unbound(nn.BatchNorm1d):
    def __call__(self, x: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, x)


class ByFunction(nn.BatchNorm1d):
    def __call__(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.3)


@pytest.mark.parametrize("in_glue", [False, True])
@pytest.mark.parametrize("kind", [Sequences, Clamped, Unbound, ByFunction])
def test_statistics_are_of_what_batch_norm_computes_with(kind, in_glue):
    """Also if that is not the module's argument, or if the module is not called."""
    x = torch.randn(9, 3, 3) + torch.arange(3.0)
    model = nn.Sequential(nn.Identity(), nn.Sequential(kind(3), nn.Linear(3, 3)), nn.Linear(3, 3))
    full = copy.deepcopy(model)
    pipe = deferred(model, {"1.1" if in_glue else "2": 1}, chunks=3)
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=loss_of)
        full(x)
    for name, value in full.named_buffers():
        assert_close(model.get_buffer(name), value)


class ByHand(nn.BatchNorm1d):
    """Updates its statistics by itself, as batch norm does, with ways of its own to compute them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean, count = x.mean(0), len(x)
            variance = (x.square().mean(0) - mean.square()) * count / (count - 1)
            self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * variance
        return x - x.mean(0)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_a_subclass_may_update_its_statistics_by_itself(size, constant):
    """Its numbers are rounded otherwise, also in channels that are constant."""
    model = nn.Sequential(ByHand(3), nn.Linear(3, 3))
    full = nn.BatchNorm1d(3)
    pipe = deferred(model, {"1": 1}, chunks=2)
    for _ in range(3):
        x = torch.randn(size, 3)
        x[:, 0] = constant
        pipe.forward_backward(x, loss_fn=loss_of)
        full(x)
    for name in ("running_mean", "running_var"):
        assert_close(getattr(model[0], name), getattr(full, name), rtol=1e-5, atol=1e-5)


class Biased(nn.BatchNorm1d):
    """Updates its statistics by itself, and not as batch norm does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_var.lerp_(x.var(0, unbiased=False), self.momentum)
        return x - x.mean(0)


class Decaying(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        normalized = super().forward(x)
        self.running_mean.mul_(0.9)
        return normalized


class OfHalf(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        mean, variance = (b.view(-1)[:1] for b in (self.running_mean, self.running_var))
        return F.batch_norm(x[:, :1], mean, variance, training=True) + x


class FromOutside(nn.BatchNorm1d):
    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


@pytest.mark.parametrize("kind", [Biased, Decaying, OfHalf, FromOutside])
def test_statistics_that_follow_something_else_are_refused(kind):
    """They would be lost, or be others than the forward's own."""
    model = nn.Sequential(kind(3), nn.Linear(3, 3))
    state = copy.deepcopy(model.state_dict())
    pipe = deferred(model, {"1": 1}, chunks=2)
    with pytest.raises(
        StateError, match=rf"got others for '0', a {kind.__name__}: .*py:\d+\); call"
    ):
        pipe.forward_backward(torch.randn(8, 3), loss_fn=loss_of)
    assert all(equal(state[key], value) for key, value in model.state_dict().items())


def test_frozen_modules_are_left_alone():
    """A batch norm in eval mode, or one that tracks nothing, does what it always does."""
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3)
    )
    model[0].eval()
    state = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    x = torch.randn(8, 3, 5)
    pipe = deferred(model, {"1": 1}, chunks=2)
    loss = pipe.forward_backward(x, loss_fn=loss_of).loss
    assert difference(model, plain, loss, plain_step(plain, (x,), {}, None, loss_of, 2)).loss == 0
    assert all(equal(state[key], value) for key, value in model.state_dict().items())
