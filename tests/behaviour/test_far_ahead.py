"""Offload, recomputation and random states where the host is far ahead of the devices: on the
simulated accelerator."""

import copy
import gc
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.crossing import host_stores as storing
from blockpipe.devices import rng_streams as randomness
from blockpipe.errors import StateError

from ..models import FeedForward, square
from ..stage_devices import stages

if stages(1) == ["cpu"]:
    pytest.skip("needs an asynchronous device: --simulated", allow_module_level=True)

from .. import simulated

CHUNKS, WIDTH, ROWS = 8, 64, 256


class Layer(FeedForward):
    def __init__(self, times=4):
        super().__init__(WIDTH, times)


class Noisy(Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.norm(super().forward(x)).relu_())


def layers(kind=Layer, count=8):
    net = nn.Sequential(*(kind() for _ in range(count)))
    return bp.begin_blocks(net, {str(count // 2): 1})


def wide():
    """So wide inside that what crosses is little beside it."""
    return layers(lambda: Layer(16))


def syncs():
    return {k: n for k, n in simulated.counts().items() if k.startswith("sync")}


@pytest.fixture(autouse=True)
def _no_race():
    gc.collect()
    simulated.reset()
    yield
    simulated.set_delay(0, 0)
    simulated.set_flags()
    simulated.settle()
    assert (simulated.races(), simulated.error()) == ([], "")


def piped(net, schedule="1f1b", **options):
    """A pipeline that has had its first step."""
    pipe = bp.Pipeline(net, devices=stages(2), chunks=CHUNKS, schedule=schedule, **options)
    pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square)
    simulated.settle()
    return pipe


def peaks(pipe, delay=1000):
    """A step's memory, with the host far ahead."""
    simulated.set_delay(delay // 2, delay)
    with pipe.measured_memory() as report:
        pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square)
    return report


# --- offload


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_offload_needs_less_memory_and_says_how_much(schedule):
    """Far less than without, and within 12 % of what is reported."""
    without = peaks(piped(wide(), schedule))
    gc.collect()
    report = peaks(piped(wide(), schedule, offload=True))
    for stage, other in zip(report.stages, without.stages, strict=True):
        assert abs(stage.peak - stage.measured) < 0.12 * stage.measured, str(report)
        static = stage.parameters + stage.gradients
        assert stage.measured - static < 0.6 * (other.measured - static), str(report)
    if schedule == "gpipe":
        assert report.stages[0].measured < 0.2 * without.stages[0].measured


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_offload_never_needs_more(schedule, checkpoint):
    """With recomputation or with a backward in two parts, which have all of a micro-batch back."""
    without = peaks(piped(wide(), schedule, checkpoint=checkpoint))
    gc.collect()
    report = peaks(piped(wide(), schedule, checkpoint=checkpoint, offload=True))
    for stage, other in zip(report.stages, without.stages, strict=True):
        assert stage.measured < 1.05 * other.measured
        assert stage.measured < 1.25 * stage.peak, str(report)


def test_memory_does_not_depend_on_how_far_the_host_is_ahead():
    """What is let go is free in the order of the stream."""
    gc.collect()
    pipe = piped(wide(), "gpipe", offload=True)
    near, far = ([s.measured for s in peaks(pipe, delay).stages] for delay in (0, 2000))
    assert near == pytest.approx(far, rel=0.12)


def test_pinned_memory_is_that_of_what_is_in_flight(monkeypatch):
    """Under 1f1b two micro-batches' of stage 0 and one's of stage 1, however many there are."""
    buffers, made = set(), []
    init = storing.Store.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self.device)
        buffers.add(self._host.data_ptr())

    pipe = piped(layers(), offload=True)
    monkeypatch.setattr(storing.Store, "__init__", watched)
    simulated.set_delay(500, 1000)
    pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square)
    assert len(buffers) <= 0.25 * len(made)


@pytest.mark.timed
def test_copies_overlap_with_compute():
    """Most of their time on the busier device; nobody waits for all of a micro-batch."""
    pipe = piped(layers(), offload=True)
    simulated.reset()
    simulated.set_delay(1000, 1000)
    simulated.set_flags(trace=True)
    pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square)
    simulated.settle()
    spans = [span for span in simulated.spans() if span[0] == 1]
    computed = [(begin, end) for _, stream, _, begin, end in spans if stream == 0]
    copied = [(begin, end) for _, stream, name, begin, end in spans if stream and "host" in name]
    shared = sum(
        max(0, min(end, last) - max(begin, first))
        for begin, end in copied
        for first, last in computed
    )
    took = sum(end - begin for begin, end in copied)
    assert len(copied) > 2 * CHUNKS
    assert shared > 0.6 * took


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_are_those_without(schedule, checkpoint):
    """To the bit, with delays by chance; nothing is read or used again too early."""
    net = layers(Noisy, count=4)
    other = copy.deepcopy(net)
    found = []
    for model, offload in ((net, False), (other, True)):
        torch.manual_seed(1)
        pipe = piped(model, schedule, checkpoint=checkpoint, offload=offload)
        simulated.set_delay(0, 300, 0.3, 7)
        for _ in range(2):
            loss = pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square).loss
        found.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_callers_batch_stays():
    """It is on the device anyway, and micro-batches are slices of it: the whole would go for each."""
    sizes = []
    init = storing.Store.__init__

    def watched(self, tensor, *args, **kwargs):
        init(self, tensor, *args, **kwargs)
        sizes.append(tensor.untyped_storage().nbytes())

    x = torch.randn(CHUNKS * ROWS, WIDTH, device="simulated:0")
    pipe = piped(layers(), offload=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storing.Store, "__init__", watched)
        pipe.forward_backward(x, loss_fn=square)
    assert sizes
    assert max(sizes) < x.nbytes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_leaves_nothing_under_way(where):
    """Its memory is let go in order, and the next step works."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if on and where == "forward" and bp.current_microbatch() == 3:
                raise ValueError("on purpose")
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            if on and where == "backward":
                raise ValueError("on purpose")
            return gradient

    class Layer2(Layer):
        def forward(self, x):
            return super().forward(Fails.apply(super().forward(x)))

    on = False
    net = bp.begin_blocks(nn.Sequential(Layer(), Layer2(), Layer(), Layer2()), {"2": 1})
    pipe = piped(net, offload=True)
    x = torch.randn(CHUNKS * ROWS, WIDTH)
    simulated.set_delay(500, 1000)
    before = [pipe.forward_backward(x, loss_fn=square).loss.cpu() for _ in range(2)]
    on = True
    with pytest.raises(ValueError, match="on purpose"):
        pipe.forward_backward(x, loss_fn=square)
    on = False
    filled = [
        torch.full((1 << 16,), 7.0, device=f"simulated:{d}") for d in (0, 1) for _ in range(8)
    ]
    assert torch.equal(pipe.forward_backward(x, loss_fn=square).loss.cpu(), before[0])
    assert all(torch.equal(t.cpu(), torch.full((1 << 16,), 7.0)) for t in filled)


# --- recomputation


def test_the_first_steps_comparisons_wait_once_for_each_device():
    """Hundreds of them, read at the step's end; no other step waits."""
    x = torch.randn(CHUNKS * ROWS, WIDTH)
    pipe = bp.Pipeline(
        layers(), devices=stages(2), chunks=CHUNKS, checkpoint="always", sample=(x[:ROWS],)
    )
    simulated.reset()  # the parameters have been placed
    pipe.forward_backward(x, loss_fn=square)
    looks = syncs().get("sync: item", 0)  # whether the loss is a number
    assert 0 < sum(syncs().values()) - looks <= 2, syncs()
    assert looks <= 1
    simulated.reset()
    pipe.forward_backward(x, loss_fn=square)
    assert syncs() == {}


@pytest.mark.parametrize("call", ["step", "pipe(x)"])
def test_what_is_made_otherwise_is_told_at_the_end_of_the_step(call):
    """Which module, stage, micro-batch and tensor; the step after it goes on."""

    class Differs(Layer):
        is_wrong = True

        def forward(self, x):
            return super().forward(x * (2.0 if self.is_wrong and bp.is_recomputing() else 1.0))

    net = bp.begin_blocks(nn.Sequential(Layer(), Layer(), Differs()), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=CHUNKS, checkpoint="always")
    x = torch.randn(CHUNKS * ROWS, WIDTH)
    simulated.set_delay(100, 300)
    state = torch.get_rng_state()
    expected = (
        r"'2' on stage 1 saved float32\[256, 64\] \(number \d of \d\) in its forward, and "
        r"float32\[256, 64\] with other numbers when it was recomputed for micro-batch 0"
    )

    def step():
        if call == "step":
            pipe.forward_backward(x, loss_fn=square)
        else:
            square(pipe(x)).backward()

    with pytest.raises(StateError, match=expected) as raised:
        step()
    assert "and so with" in raised.value.__notes__[-1]
    assert torch.equal(torch.get_rng_state(), state)
    Differs.is_wrong = False
    pipe.forward_backward(x, loss_fn=square)


def test_on_the_host_it_is_told_at_once():
    """Beside a device: the stage on the CPU has nothing to wait for."""
    begun = []

    class Counts(Layer):
        calls = 0

        def forward(self, x):
            begun.append(bp.current_microbatch())
            self.calls += 1
            return super().forward(x * self.calls)

    net = bp.begin_blocks(nn.Sequential(Layer(), Counts()), {"1": 1})
    pipe = bp.Pipeline(net, devices=["simulated:0", "cpu"], chunks=CHUNKS, checkpoint="always")
    with pytest.raises(StateError, match=r"'1' on stage 1 .* for micro-batch 0"):
        pipe.forward_backward(torch.randn(CHUNKS * ROWS, WIDTH), loss_fn=square)
    assert CHUNKS - 1 not in begun


# --- random states


class Draws(nn.Module):
    """Reads a value, so that it is recorded for real; draws from all that there is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        assert float(x.sum()) == float(x.sum())
        random.random(), np.random.rand(), torch.rand(1)
        for device in range(torch.accelerator.device_count()):
            torch.rand(2, device=f"simulated:{device}")
        return x * self.weight


def _states():
    module = torch.simulated
    devices = range(torch.accelerator.device_count())
    found = [torch.get_rng_state(), *(module.get_rng_state(device) for device in devices)]
    return [random.getstate()[1], np.random.get_state()[1].tolist(), *(s.tolist() for s in found)]


@pytest.mark.parametrize("fake", [True, False])
def test_a_recording_leaves_every_generator_where_it_was(fake):
    """Of the host and of every device, and warns of nothing."""
    net = layers(Noisy) if fake else Draws()
    for device in range(torch.accelerator.device_count()):
        for _ in range(device):  # no two are in one state
            torch.rand(1, device=f"simulated:{device}")
    before = _states()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bp.record(net, torch.ones(4, WIDTH), fake=fake)
    assert _states() == before


def test_measuring_pieces_leaves_every_generator_where_it_was():
    """balance() by time runs the forward on a device."""
    net = nn.Sequential(*(Noisy() for _ in range(3)))
    x = torch.randn(8, WIDTH)
    before = _states()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bp.balance(net, x, 2, by="time", devices=stages(2))
    assert _states() == before


def test_a_device_that_is_not_initialized_stays_so(monkeypatch):
    """Nothing was drawn there; asking would initialize it, which takes long and forbids to fork."""
    monkeypatch.setattr(torch.simulated, "is_initialized", lambda: False)
    assert not any(
        isinstance(s, torch.device) and s.type != "cpu" for s in randomness.every_source()
    )
    monkeypatch.undo()
    devices = [s for s in randomness.every_source() if isinstance(s, torch.device)]
    assert len(devices) == 1 + torch.accelerator.device_count()
