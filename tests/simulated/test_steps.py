"""When the copies of a step run, and what makes the host wait."""

import itertools
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import blockpipe as bp
from blockpipe._common.threads.thread_state import in_thread, waiting_for_device
from blockpipe.devices.copies import _copy_streams, send

from .. import simulated as accelerator
from ..models import WITH_INTERLEAVED, square
from ..stage_devices import stages


def chain(count: int) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    return bp.begin_blocks(net, {str(i): i for i in range(1, count)})


def test_a_copy_begins_when_its_source_is_there():
    """Not behind what was queued on the source's device by the time that it is read elsewhere."""
    device, other = map(torch.device, stages(2))
    source = torch.ones(4, device=device)
    there = torch.accelerator.current_stream(device).record_event()
    torch.accelerator.set_device_index(0)
    accelerator.settle()
    accelerator.set_flags(trace=True)
    accelerator.sleep(100_000)
    moved = send(source, other, after=there).receive()
    moved.add_(1)
    accelerator.settle()
    ends = {name: end for _, _, name, _, end in accelerator.spans()}
    copied = next(end for name, end in ends.items() if name.startswith("copy"))
    assert copied < ends["sleep"]


class Gate:
    """Holds a stream until it is opened, or for so long that a test must have failed."""

    def __init__(self):
        self.is_closed, self.was_closed, self._held = threading.Event(), False, ExitStack()
        self._late = threading.Timer(20, self._held.close)

    def close(self, device):
        self.is_closed.set()
        if self._late.finished.is_set():
            return  # it was opened too early, and nobody would open it again
        self._held.enter_context(accelerator.held(torch.accelerator.current_stream(device)))
        self._late.start()

    def open(self):
        self.was_closed = self._late.is_alive()
        self._late.cancel()
        self._held.close()


class Gated(nn.Module):
    """Two stages; calls what it is told to behind the first, and around the second, once it is
    armed: a step before that has shown that nothing is drawn, so that nothing takes turns.

    Args:
        calls: functions by micro-batch and place.
    """

    def __init__(self, calls):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.armed = calls, threading.Event()

    def forward(self, x):
        with bp.Block(stage=0):
            x = self.a(x)
            self._at("behind 0")
        with bp.Block(stage=1):
            self._at("before 1")
            x = self.b(x)
            self._at("behind 1")
            return x

    def _at(self, place):
        if self.armed.is_set():
            self.calls.get((bp.current_microbatch(), place), int)()


@pytest.mark.parametrize("is_host", [False, True])
def test_a_copy_of_a_step_does_not_wait_for_later_micro_batches(is_host):
    """An activation is copied as soon as its own micro-batch has computed it, whenever it is read
    first, and whatever its device has been given meanwhile."""
    first, second = stages(2)[0], "cpu" if is_host else stages(2)[1]
    gate = Gate()

    def wait_until_closed():
        with waiting_for_device():
            gate.is_closed.wait(20)

    def wait_for_the_copy():
        with waiting_for_device():
            if not is_host:  # else the layer has waited for it
                torch.accelerator.current_stream(second).synchronize()
        gate.open()

    calls = {
        (1, "behind 0"): partial(gate.close, first),
        (0, "before 1"): wait_until_closed,
        (0, "behind 1"): wait_for_the_copy,
    }
    net, x = Gated(calls), torch.randn(4, 8)
    pipe = bp.Pipeline(net, devices=[first, second], chunks=2, schedule="gpipe")
    pipe.forward_backward(x, loss_fn=square)
    net.armed.set()
    pipe.forward_backward(x, loss_fn=square)
    assert gate.was_closed


@pytest.mark.parametrize("grad", [False, True])
def test_a_copy_does_not_wait_for_the_micro_batch_before_it(grad):
    """The next activation comes while the stage still computes: the memory of the last one is not
    waited for."""
    first, second = map(torch.device, stages(2))
    gate = Gate()

    def wait_for_the_copy():
        with waiting_for_device():
            _copy_streams.between(first, second, back=False).receiving.synchronize()
        gate.open()

    calls = {(0, "before 1"): partial(gate.close, second), (1, "behind 1"): wait_for_the_copy}
    net, x = Gated(calls), torch.randn(4, 8)
    pipe = bp.Pipeline(net, devices=[first, second], chunks=2, schedule="gpipe")
    with torch.set_grad_enabled(grad):
        pipe(x)
        net.armed.set()
        pipe(x)
    assert gate.was_closed


def test_memory_that_the_caller_has_pinned_may_be_filled_anew():
    """As soon as the step returns, though no copy has begun."""
    device, x = torch.device(stages(1)[0]), torch.ones(8).pin_memory()
    with accelerator.held(_copy_streams.between(x.device, device, back=False).receiving):
        sent = send(x, device)
        x.fill_(torch.nan)
    assert sent.receive().cpu().eq(1).all()


def test_a_warm_step_waits_for_no_device():
    """Nothing in a step makes the host wait, where the model itself does not."""
    for schedule, checkpoint, where in itertools.product(
        WITH_INTERLEAVED, ["never", "always"], ["cpu", stages(1)[0]]
    ):
        pipe = bp.Pipeline(
            chain(4), devices=stages(4), chunks=4, schedule=schedule, checkpoint=checkpoint
        )
        x, y = torch.randn(12, 8).to(where), torch.randn(12, 8).to(where)
        for _ in range(2):
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        accelerator.set_flags(raise_syncs=True)
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        accelerator.set_flags()


@pytest.mark.parametrize("at", range(4))
def test_a_stage_on_the_cpu_waits_for_what_comes_to_it_alone(at):
    """Once for each micro-batch's activation, and once for its gradient."""
    devices = stages(4)
    devices[at] = "cpu"
    pipe = bp.Pipeline(chain(4), devices=devices, chunks=4)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    accelerator.settle()
    accelerator.reset()
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    waits = sum(n for what, n in accelerator.counts().items() if what.startswith("sync"))
    assert waits <= 4 * ((at > 0) + (at < 3))


class Asks(nn.Linear):
    """A module that asks the device for a value."""

    def forward(self, x):
        return super().forward(x).relu() * x.detach().mean().item()


class Watches(TorchFunctionMode):
    """Notes for each function whether the forward lock was free when it was called."""

    def __init__(self):
        super().__init__()
        self.free = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.free.setdefault(func.__name__, set()).add(in_thread.forward_lock is None)
        return func(*args, **(kwargs or {}))


def test_who_asks_a_device_for_a_value_lets_others_run():
    """The forward lock is free while glue, or a module that runs untouched, waits for the device."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), Asks(8, 8)

        def forward(self, x):
            with bp.Block(0):
                h = self.a(x).tanh()
                least = h.detach().min().item()
            with bp.Block(1):
                return self.b(h).clamp(least)

    pipe, x = bp.Pipeline(Net(), devices=stages(2), chunks=4), torch.randn(8, 8)
    pipe.forward_backward(x, loss_fn=square)
    with Watches() as watches:
        pipe.forward_backward(x, loss_fn=square)
    assert watches.free["item"] == watches.free["relu"] == {True}
    assert watches.free["tanh"] == watches.free["clamp"] == {False}
