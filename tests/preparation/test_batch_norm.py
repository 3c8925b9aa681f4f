"""Deferred batch norm: running statistics of the whole batch, committed once a step."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.preparation.batch_norm import merged, statistics

from ..models import EVERY_SCHEDULE
from ..parity import difference, plain_step
from ..stage_devices import assert_close, equal, examples, host, stages

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def deferred(model: nn.Module, marks: dict[str, int], **options: Any) -> bp.Pipeline:
    bp.begin_blocks(model, marks)
    devices = stages(max(marks.values(), default=0) + 1)
    return bp.Pipeline(model, devices=devices, deferred_batch_norm=True, **options)


def net(channels: int = 3, dims: int = 1, **options: Any) -> nn.Sequential:
    """A batch norm on each of two stages; the first one sees the batch as it is."""
    kind = NORMS[dims]
    return nn.Sequential(
        kind(channels, **options), nn.Tanh(), kind(channels, **options), nn.Flatten()
    )


def assert_as_full_batch(pipelined: nn.Module, before: nn.Module, x: Tensor) -> None:
    """A batch norm that saw a batch in parts has the statistics of one that saw it whole, in double
    precision: in single precision torch's own are off by 4e-6 where the mean is 10,000."""
    full = copy.deepcopy(before).double().train()
    full(x.double())
    mean, variance = full.running_mean.float(), full.running_var.float()
    assert_close(pipelined.running_mean, mean, rtol=1e-6, atol=1e-6 * float(x.std()))
    assert_close(pipelined.running_var, variance, rtol=1e-6, atol=0)
    assert equal(pipelined.num_batches_tracked, full.num_batches_tracked)


class Watch:
    """What each batch norm of a model got, and what its statistics should be after a step."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {
            path: copy.deepcopy(m)
            for path, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }
        self.model = model
        self.seen: dict[str, list[Tensor]] = {path: [] for path in self.before}
        for path in self.before:
            model.get_submodule(path).register_forward_pre_hook(partial(self.see, path))

    def see(self, path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if bp.current_microbatch() is not None:
            self.seen[path].append(host(args[0]).double())

    def check(self) -> None:
        for path, old in self.before.items():
            if not old.training:
                continue
            new = self.model.get_submodule(path)
            x = torch.cat(self.seen[path]).transpose(0, 1).flatten(1)
            assert int(new.num_batches_tracked) == int(old.num_batches_tracked) + 1
            factor = 1 / int(new.num_batches_tracked) if old.momentum is None else old.momentum
            for name, now in (("running_mean", x.mean(1)), ("running_var", x.var(1))):
                was = getattr(old, name).double()
                expected = (host(was) + factor * (now - host(was))).to(new.running_mean.dtype)
                assert_close(getattr(new, name), expected, rtol=1e-6, atol=1e-6)


# --- the statistics


@pytest.mark.parametrize("momentum", [0.1, None, 1.0, 0.0])
@pytest.mark.parametrize("mean", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_statistics_equal_the_whole_batchs(dims, mean, momentum):
    """Uneven micro-batches commit the whole batch's statistics, also where the mean is large."""
    spread = torch.tensor([0.5, 1, 3]).view(3, *(1,) * dims)
    x = torch.randn(11, 3, *(5, 4, 3)[:dims]) * spread + mean
    model = net(dims=dims, momentum=momentum)
    before = copy.deepcopy(model[0])
    deferred(model, {"2": 1}, chunks=4).forward_backward(x, loss_fn=loss_of)
    assert_as_full_batch(model[0], before, x)


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_statistics_of_rows_equal_double_precision(momentum):
    """Of ``[batch, channels]`` too; torch's own float32 is off by 1e-4 there at a mean of 1e4, so
    it is the double-precision batch norm that is met."""
    x = torch.randn(1000, 32) + 1e4
    model = net(32, momentum=momentum)
    before = copy.deepcopy(model[0])
    deferred(model, {"2": 1}, chunks=7).forward_backward(x, loss_fn=loss_of)
    full = before.double()
    full(x.double())
    for name in ("running_mean", "running_var"):
        expected = getattr(full, name).float()
        assert_close(getattr(model[0], name), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_statistics_of_double_and_half_precision_are_exact(dtype):
    """Double and half precision are tracked too, the latter without losing precision."""
    x = (torch.randn(12, 3, 5) + 3).to(dtype)
    model = net(dims=1)
    if dtype == torch.float64:
        model = model.double()
    before = copy.deepcopy(model[0])
    deferred(model, {"2": 1}, chunks=3).forward_backward(x, loss_fn=loss_of)
    before = before.double()
    before(x.double())
    for name in ("running_mean", "running_var"):
        found, expected = getattr(model[0], name).double(), getattr(before, name)
        assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.cpu("the CPU's kernel gives other types than a device's")
def test_half_precision_buffers_round_once():
    """A model in bfloat16 rounds once, at the commit."""
    x = torch.randn(8, 3, 5).bfloat16()
    model = net().bfloat16()
    deferred(model, {"2": 1}, chunks=4).forward_backward(x, loss_fn=loss_of)
    expected = (0.1 * x.double().mean((0, 2))).bfloat16()
    assert equal(model[0].running_mean, expected)


def test_fewer_microbatches_than_asked_commit_too():
    """Six samples in four chunks, where torchgpipe commits nothing, and two samples in four."""
    for size in (6, 2):
        x = torch.randn(size, 3, 4, 4)
        model = net(dims=2)
        before = copy.deepcopy(model[0])
        deferred(model, {"2": 1}, chunks=4).forward_backward(x, loss_fn=loss_of)
        assert_as_full_batch(model[0], before, x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_half_a_million_numbers_are_added_up_precisely(layout):
    """Half a million numbers a channel are added up as precisely."""
    x = (torch.randn(8, 2, 256, 256) + 1e4).contiguous(memory_format=layout)
    parts = [statistics(part) for part in x.split(3)]
    whole = merged(parts)
    exact = x.double()
    assert_close(whole.mean, exact.mean((0, 2, 3)), rtol=1e-9, atol=0)
    variance = whole.squares / (whole.samples - 1)
    assert_close(variance, exact.var((0, 2, 3)), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:chunks=1 on")
@settings(deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(EVERY_SCHEDULE),
    st.sampled_from([0.1, None, 1.0, 0.0]),
    st.sampled_from([0.0, 1e4]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_batch_and_schedule_commit_what_modules_got(
    batch, chunks, dims, schedule, momentum, mean, isolate, seed
):
    """Any batch, chunks, schedule and momentum: gradients equal the plain loop's to the bit, and
    each batch norm's statistics are those of all that it got."""
    torch.manual_seed(seed)
    x = torch.randn(batch, 3, *(4, 2, 3)[:dims]) + mean
    model = net(dims=dims, momentum=momentum)
    plain, before = copy.deepcopy(model), copy.deepcopy(model[0])
    watch = None if isolate else Watch(model)
    isolate = isolate and schedule != "uncut"
    pipe = deferred(model, {"1": 1, "2": 2}, chunks=chunks, schedule=schedule, isolate=isolate)
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=loss_of).loss
        expected = plain_step(plain, (x,), {}, None, loss_of, chunks)
        if watch is not None:
            watch.check()
            watch = None
            assert_as_full_batch(model[0], before, x)
    plain.load_state_dict(model.state_dict())
    assert difference(model, plain, loss, expected).same


def test_every_schedule_commits_the_same_bits():
    """Every schedule commits the same bits."""
    x = torch.randn(10, 3, 5) + 100
    found = []
    for schedule in EVERY_SCHEDULE:
        torch.manual_seed(0)
        model = net()
        deferred(model, {"2": 1}, chunks=4, schedule=schedule).forward_backward(x, loss_fn=loss_of)
        found.append(model.state_dict())
    for state in found[1:]:
        assert all(equal(state[key], found[0][key]) for key in state)


def test_steps_in_a_row():
    """Each step commits once; with momentum None the average is over steps."""
    for momentum in (0.3, None):
        model = net(momentum=momentum)
        full = copy.deepcopy(model[0])
        pipe = deferred(model, {"2": 1}, chunks=3)
        for step in range(4):
            x = torch.randn(7 + step, 3, 5) + step
            pipe.forward_backward(x, loss_fn=loss_of)
            full(x)
        assert_close(model[0].running_mean, full.running_mean, rtol=1e-6, atol=1e-6)
        assert_close(model[0].running_var, full.running_var, rtol=1e-6, atol=0)
        assert int(model[0].num_batches_tracked) == 4


def test_eval_uses_what_was_committed():
    """An evaluation normalizes by the committed statistics, and changes none."""
    x = torch.randn(9, 3, 5) + 2
    model = net()
    pipe = deferred(model, {"2": 1}, chunks=3)
    pipe.forward_backward(x, loss_fn=loss_of)
    plain = copy.deepcopy(model).cpu().eval()
    state = copy.deepcopy(model.state_dict())
    pipe.eval()
    with torch.no_grad():
        assert_close(pipe(x), plain(x))
    assert all(equal(state[key], value) for key, value in model.state_dict().items())


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


class Body(nn.Module):
    """A sealed module that may compute what it holds twice, or fail."""

    def __init__(self, body: nn.Module, recompute: str = "") -> None:
        super().__init__()
        self.body, self.recompute = body, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
        return self.body(x)


@pytest.mark.parametrize(
    ("recompute", "mark"),
    [("reentrant", "1"), ("not reentrant", "1"), ("not reentrant", "1.body.2")],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "uncut", "plain"])
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


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Renormalizing])
@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "sequential", "uncut"])
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


# --- nothing stays


class Fails(nn.Module):
    """Fails in the second micro-batch, in forward or in backward."""

    phase = "no phase"

    def forward(self, x: Tensor) -> Tensor:
        second = bp.current_microbatch() == 1
        if second and self.phase == "forward":
            raise ValueError("boom")
        if second and self.phase == "backward":
            x.register_hook(self.fail)
        return x * 1

    def fail(self, gradient: Tensor) -> Tensor:
        raise ValueError("boom")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "uncut"])
def test_a_failed_step_commits_nothing(schedule, phase):
    """A step that fails commits nothing; the next one commits its own."""
    model = nn.Sequential(*net()[:3], nn.Linear(5, 5), Body(Fails()))
    state, before = copy.deepcopy(model.state_dict()), copy.deepcopy(model[0])
    own = dict(model.named_buffers())
    pipe = deferred(model, {"2": 1}, chunks=3, schedule=schedule)
    x = torch.randn(9, 3, 5)
    Fails.phase = phase
    try:
        with pytest.raises(ValueError, match="boom"):
            pipe.forward_backward(x, loss_fn=loss_of)
    finally:
        Fails.phase = "no phase"
    assert all(equal(state[key], value) for key, value in model.state_dict().items())
    assert all(own[name] is value for name, value in model.named_buffers())
    pipe.forward_backward(x, loss_fn=loss_of)
    assert_as_full_batch(model[0], before, x)


def test_between_steps_nothing_is_on_the_modules():
    """Between steps nothing is on the modules, and copies and pickles work."""
    model = net()
    pipe = deferred(model, {"2": 1}, chunks=2)
    own = [dict(m.__dict__) for m in model.modules()]
    buffers = list(model.buffers())
    x = torch.randn(8, 3, 5)
    pipe.forward_backward(x, loss_fn=loss_of)
    for before, module in zip(own, model.modules(), strict=True):
        assert before.keys() == module.__dict__.keys()
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        other.forward_backward(x, loss_fn=loss_of)
        assert int(other.module[0].num_batches_tracked) == 2
    assert int(model[0].num_batches_tracked) == 1


class Seen(nn.BatchNorm1d):
    """Notes what its forward is given, and the buffers that it writes to."""

    refs: ClassVar[list[weakref.ref[Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        if bp.current_microbatch() is not None:
            self.refs += [weakref.ref(t) for t in (x, self.running_mean, self.running_var)]
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_nothing_of_a_step_is_alive_after_it(schedule):
    """After a step nothing of it is alive, with the collector off."""
    model = nn.Sequential(nn.Linear(4, 4), Seen(4), nn.Tanh(), Seen(4))
    pipe = deferred(model, {"2": 1}, chunks=3, schedule=schedule)
    Seen.refs.clear()
    gc.collect()
    gc.disable()
    try:
        pipe.forward_backward(torch.randn(9, 4), loss_fn=loss_of)
        alive = [ref() for ref in Seen.refs if ref() is not None]
    finally:
        gc.enable()
    assert len(Seen.refs) == 18
    assert not alive


# --- words


def test_synchronized_modules_are_named():
    """SyncBatchNorm is left alone: a warning says so at once, and the summary again."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.Linear(3, 3)).eval()
    with pytest.warns(UserWarning, match=r"leaves SyncBatchNorm alone \(1\)") as caught:
        pipe = deferred(model, {"2": 1}, chunks=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with torch.no_grad():
        pipe(torch.randn(4, 3))
    assert "batch norm deferred: 1 module" in str(pipe.summary())
    assert "not deferred, SyncBatchNorm: 1" in str(pipe.summary())
    with warnings.catch_warnings():
        bp.Pipeline(model, devices=stages(2), chunks=2)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_wrong_option_is_refused(value):
    """The option is True or False."""
    with pytest.raises(
        UsageError, match=r"expected True or False for deferred_batch_norm, got .*\.py:\d+"
    ):
        bp.Pipeline(net(), devices=["cpu"], deferred_batch_norm=value)


def test_cuda_graphs_are_refused():
    """A captured forward would not be looked at: refused."""
    pipe = bp.Pipeline(net(), devices=["cpu"], deferred_batch_norm=True)
    with pytest.raises(UsageError, match="leave one of them out"):
        pipe.compile(cuda_graphs=True)


def test_a_copy_made_in_a_step_is_of_the_module_alone():
    """Deep copies and pickles taken by the loss function have forwards of their own."""
    model = net(4)
    pipe = deferred(model, {"1": 1}, chunks=2)
    copies = []

    def loss_that_copies(output: Tensor) -> Tensor:
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))
        return loss_of(output)

    x = torch.randn(8, 4)
    pipe.forward_backward(x, loss_fn=loss_of)
    pipe.forward_backward(x, loss_fn=loss_that_copies)
    for copied in copies:
        norm = next(m for m in copied.modules() if isinstance(m, nn.BatchNorm1d)).cpu()
        with torch.no_grad():
            norm.weight.zero_()
            norm.bias.zero_()
        before = copy.deepcopy(model.state_dict())
        assert norm(x).abs().max() == 0
        assert all(equal(before[key], value) for key, value in model.state_dict().items())


def test_steps_of_two_threads_take_turns():
    """None of them takes the other's clones for the buffers."""
    model = net(4)
    pipe = deferred(model, {"1": 1}, chunks=2)
    own = [id(b) for b in model.buffers()]
    x = torch.randn(8, 4)
    pipe.forward_backward(x, loss_fn=loss_of)

    def steps() -> None:
        for _ in range(5):
            pipe.forward_backward(x, loss_fn=loss_of)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [id(b) for b in model.buffers()] == own
    assert {int(b) for n, b in model.named_buffers() if n.endswith("tracked")} == {11}
