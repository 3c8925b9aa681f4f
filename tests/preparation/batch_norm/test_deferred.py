"""Deferred batch norm: running statistics of the whole batch, committed once a step."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.preparation.batch_norm.statistics import merged, statistics

from ...models import EVERY_SCHEDULE
from ...parameter_sets import each_value, every_pair
from ...parity import difference, plain_step
from ...stage_devices import assert_close, equal, examples, stages
from .. import batch_norm_models
from ..batch_norm_models import Body, Watch, assert_as_full_batch, deferred, loss_of, net

# --- the statistics


@every_pair(
    dims=[1, 2, 3],
    mean=[0.0, 1e4, -1e4],
    momentum=[0.1, None, 1.0, 0.0],
)
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


@each_value(
    schedule=["1f1b", "gpipe", "sequential", "uncut"],
    phase=["forward", "backward"],
)
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
    assert caught[0].filename == batch_norm_models.__file__  # which makes the pipeline
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
