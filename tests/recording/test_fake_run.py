"""A model that is not placed yet is recorded on fakes of the devices that it will be on."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.restoring import leaked_tensors

from ..hiding import hidden
from ..stage_devices import stages

# Fakes of a device that torch was built for need no such device.
FAR = torch.device(stages(1)[0] if stages(1) != ["cpu"] else "cuda:0")


class Sees(nn.Module):
    """Notes where its tensors are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        shelf().append((x.device.type, self.layer.weight.device.type, self.shift.device.type))
        with bp.Block(1):
            return self.layer(x) + self.shift


seen: list[tuple[str, str, str]] = []
# A recording puts back what it finds by names; through this no walk comes.
shelf = hidden(seen)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_the_forward_sees_the_devices_that_it_is_meant_for(where):
    seen.clear()
    net = Sees().to(where)
    recording = bp.record(net, torch.ones(2, 4, device=where), intended=[FAR, FAR])
    assert set(seen) == {(FAR.type,) * 3}
    assert recording.why_elsewhere is None
    assert recording.why_real is None
    assert {t.device.type for t in (*net.parameters(), *net.buffers())} == {where}


def test_where_all_are_on_the_cpu_nothing_is_other_than_before():
    seen.clear()
    bp.record(Sees(), torch.ones(2, 4), intended=[torch.device("cpu")] * 2)
    assert set(seen) == {("cpu",) * 3}


def test_stages_on_two_kinds_of_devices():
    """Each parameter is on a fake of its own stage's."""
    found = []
    shelf = hidden(found)

    class Layer(nn.Linear):
        def forward(self, x):
            shelf().append((x.device.type, self.weight.device.type))
            return super().forward(x)

    net = bp.begin_blocks(nn.Sequential(Layer(4, 4), Layer(4, 4)), {"1": 1})
    recording = bp.record(net, torch.ones(2, 4), intended=[torch.device("cpu"), FAR])
    assert found[:2] == [("cpu", "cpu")] * 2  # to know which stage each is on
    assert [weight for _, weight in found[-2:]] == ["cpu", FAR.type]
    assert recording.route == [0, 1]
    assert recording.why_elsewhere is None


class Stubborn(nn.Module):
    """Makes a tensor on the CPU, wherever it is."""

    def forward(self, x):
        return x + torch.ones(4, device="cpu")


def test_a_function_of_pythons_for_each_element_runs_for_real():
    """On a fake tensor torch calls it with what is at address 0, and the process was gone."""

    class Applies(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with bp.Block(0):
                h = self.a(x * x.detach().cpu().clone().apply_(abs).to(x.device))
            with bp.Block(1):
                return self.b(h)

    net = Applies()
    recording = bp.record(net, torch.randn(2, 4))
    assert not recording.fake
    assert recording.route == [0, 1]
    assert torch.equal(torch.tensor([-2.0, 3.0]).apply_(abs), torch.tensor([2.0, 3.0]))


def test_what_cannot_run_there_runs_where_it_is_and_the_summary_says_so():
    recording = bp.record(Stubborn(), torch.ones(2, 4), intended=[FAR])
    assert recording.fake
    assert recording.why_elsewhere is not None
    assert "recorded where the model is, and not on fakes" in str(recording.summary())


def test_what_needs_values_runs_for_real():
    """The fakes are not to blame, so that nothing is said of them."""

    class Reads(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    recording = bp.record(Reads(), torch.ones(2, 4), intended=[FAR])
    assert not recording.fake
    assert recording.why_elsewhere is None


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.skipif(stages(1) == ["cpu"], reason="needs the simulated accelerator")
def test_kernels_are_those_of_the_device():
    """The CPU has one kernel for attention. The simulated accelerator has none, and keeps more."""
    x = torch.ones(2, 2, 16, 8, requires_grad=True)
    near, far = (bp.record(Attention(), x, intended=[d]) for d in (torch.device("cpu"), FAR))
    assert near.hops[0].kernels < far.hops[0].kernels
    assert near.hops[0].never.bytes < far.hops[0].never.bytes
    pipe = bp.Pipeline(Attention(), devices=stages(1), chunks=1)
    pipe.summary(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert pipe.memory(x).stages[0].kept == far.hops[0].never.bytes


@pytest.mark.skipif(stages(1) == ["cpu"], reason="needs the simulated accelerator")
@pytest.mark.parametrize("measure", [True, False])
def test_balance_records_on_the_devices_that_it_balances_for(measure):
    seen.clear()
    net = nn.Sequential(nn.Linear(4, 4), Sees())
    bp.balance(net, torch.ones(2, 4), 2, measure=measure, devices=stages(2), repeats=1)
    assert {where for call in seen for where in call} == {FAR.type}


def test_autocast_keeps_no_cast_of_a_fake_weight(monkeypatch):
    """Its cache kept one of each weight, and each of them was then searched for in all objects."""
    searched = []
    monkeypatch.setattr(leaked_tensors.gc, "collect", lambda: searched.append(1))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bp.record(net, torch.ones(2, 4))
    assert not searched


class LeavesCycle(nn.Module):
    def forward(self, x):
        cycle = [x * 2]
        cycle.append(cycle)
        return x + 1


def test_a_tensor_in_a_cycle_is_no_leak_when_another_thread_collects():
    """Until that thread is done, ``gc.collect()`` does nothing here."""
    is_collecting, is_over = threading.Event(), threading.Event()

    def wait(phase, _):
        if phase == "start" and threading.current_thread() is other:
            is_collecting.set()
            is_over.wait(0.2)

    other = threading.Thread(target=gc.collect)
    gc.callbacks.append(wait)
    try:
        other.start()
        assert is_collecting.wait(20)
        bp.record(LeavesCycle(), torch.ones(2, 4))
    finally:
        is_over.set()
        other.join()
        gc.callbacks.remove(wait)
