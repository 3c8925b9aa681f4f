"""Profiles of real steps: every action once, on its lane; nothing changes, nothing stays."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.devices.observer import Observer
from blockpipe.errors import UsageError
from blockpipe.reports.timeline.profiling import Profile

from ...models import EVERY_SCHEDULE
from ...parameter_sets import each_value
from ...stage_devices import equal, stages
from .profiled import CHUNKS, STAGES, check, made, step


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_every_action_is_there_once(schedule):
    """In two steps, under each schedule."""
    pipe = made(schedule)
    with pipe.profile() as t:
        step(pipe)
        step(pipe)
    kinds = "FBW" if any(e.kind == "W" for e in t.events) else "FB"
    assert kinds == "FBW" or schedule != "zb-h1"
    check(t, kinds, steps=2)
    assert t.steps[0].inline == (schedule in ("sequential", "uncut"))
    assert len(t.lanes) == STAGES
    if schedule not in ("uncut", "auto"):
        assert t.steps[0].schedule.name == schedule


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "sequential"])
def test_recomputation_is_an_action(schedule):
    """An R for each hop and micro-batch, before its B."""
    pipe = made(schedule, checkpoint="always")
    with pipe.profile() as t:
        step(pipe)
    check(t, "FBWR" if schedule == "zb-h1" else "FBR")


def test_stages_that_share_a_lane():
    """Hops run on the lane of their device."""
    devices = ["cpu:0", "cpu:1", "cpu:0"]
    pipe = made("1f1b", devices)
    with pipe.profile() as t:
        step(pipe)
    check(t, lane_of=[0, 1, 0])
    assert [lane.name for lane in t.lanes] == ["cpu:0", "cpu:1"]


def test_one_lane_is_the_plain_loop():
    """Hops begin at their marks; the one backward counts as the last hop's."""
    pipe = made("1f1b", ["cpu:0"] * STAGES)
    with pipe.profile() as t:
        step(pipe)
    found = sorted((e.kind, e.hop, e.microbatch) for e in t.actions())
    forwards = [("F", hop, m) for hop in range(STAGES) for m in range(CHUNKS)]
    assert found == sorted([*forwards, *(("B", STAGES - 1, m) for m in range(CHUNKS))])
    assert t.steps[0].inline
    assert t.bubble() < 0.9
    assert not [e for e in t.events if e.kind == "wait"]


def test_a_model_without_marks_is_one_hop():
    """One hop: a forward and a backward for each micro-batch."""
    pipe = bp.Pipeline(nn.Linear(4, 4), devices=["cpu"], chunks=CHUNKS)
    with pipe.profile() as t:
        step(pipe)
        step(pipe)
    assert sorted((e.step, e.kind, e.microbatch) for e in t.actions()) == [
        (n, kind, m) for n in range(2) for kind in "BF" for m in range(CHUNKS)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_a_call_and_its_backward_are_one_step(schedule):
    """``pipe(x)`` and ``backward()``; uncut, the backward is the caller's own and is not seen."""
    pipe = made(schedule)
    with pipe.profile() as t:
        pipe(torch.ones(8, 4)).sum().backward()
    check(t, "F" if schedule == "uncut" else "FB")
    assert len(t.steps) == 1


def test_a_forward_without_grad_has_forwards_alone():
    """Under ``no_grad`` there are forwards, and a prediction of forwards."""
    pipe = made()
    with pipe.profile() as t, torch.no_grad():
        pipe(torch.ones(8, 4))
    check(t, "F")
    assert t.steps[0].forward_only
    assert {e.kind for e in t.predicted().actions()} == {"F"}
    assert sum(t.predicted().busy()) == pytest.approx(CHUNKS * sum(t.costs().forward), rel=1e-6)


def test_copies_go_both_ways():
    """A crossing forward and its gradient back, with the tensor's size; inputs and targets too."""
    pipe = made()
    with pipe.profile() as t:
        step(pipe)
    copies = [e for e in t.events if e.kind == "copy" and e.microbatch == 1]
    ways = sorted((e.source, e.hop) for e in copies)
    # What skips hop 1 comes back by it: it has read the tensor too, and adds its own gradient.
    assert ways == [(-1, 0), (-1, 2), (0, 1), (0, 2), (1, 0), (1, 2), (2, 1), (2, 1)]
    assert {e.bytes for e in copies} == {2 * 4 * 4}
    assert {e.lane for e in copies if e.hop == 2} == {2}


@pytest.mark.cpu("it has no sparse tensors")
def test_a_sparse_tensor_that_crosses_counts_as_dense():
    """A sparse tensor counts as a dense one; a recomputation in glue crosses too."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with bp.Block(0):
                x = self.a(x)
                sparse = torch.eye(len(x)).to_sparse()
            with bp.Block(1):
                y = checkpoint(lambda t: torch.tanh(self.b(t) + x), x * 1, use_reentrant=False)
                return torch.sparse.mm(sparse, y)

    pipe = bp.Pipeline(Odd(), devices=stages(2), chunks=CHUNKS)
    step(pipe)
    expected = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    with pipe.profile() as t:
        step(pipe)
    for p, gradient in zip(pipe.parameters(), expected, strict=True):
        assert equal(p.grad, gradient)
    sizes = {e.bytes for e in t.events if e.kind == "copy" and (e.source, e.hop) == (0, 1)}
    assert sizes == {2 * 4 * 4, 2 * 2 * 4}


def test_waits_are_between_forwards():
    """A run's wait for a hop ends where the hop begins, and it follows the hop before."""
    pipe = made()
    with pipe.profile() as t:
        step(pipe)
    forwards = {(e.hop, e.microbatch): e for e in t.events if e.kind == "F"}
    waits = [e for e in t.events if e.kind == "wait"]
    assert len(waits) == STAGES * CHUNKS
    for wait in waits:
        forward = forwards[wait.hop, wait.microbatch]
        assert wait.end <= forward.start
        if wait.hop:
            assert forwards[wait.hop - 1, wait.microbatch].end <= wait.start


@each_value(
    schedule=["gpipe", "1f1b", "zb-h1", "sequential", "uncut"],
    isolate=[False, True],
)
def test_profiling_changes_no_gradient(schedule, isolate):
    """To the bit."""
    if isolate and schedule == "uncut":
        return
    plain, seen = (made(schedule, isolate=isolate) for _ in range(2))
    expected = step(plain).loss
    with seen.profile():
        loss = step(seen).loss
    assert equal(loss, expected)
    for p, q in zip(seen.parameters(), plain.parameters(), strict=True):
        assert equal(p.grad, q.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "sequential", "uncut"])
def test_a_profile_keeps_no_tensor(schedule):
    """Of a profiled step's tensors none is alive, not even while the profile goes on."""
    pipe = made(schedule)
    pipe.module.seen.clear()
    gc.collect()
    gc.disable()
    try:
        with pipe.profile() as t:
            step(pipe)
            assert not [ref for ref in pipe.module.seen if ref() is not None]
        assert len(pipe.module.seen) == STAGES * CHUNKS
        assert pipe._profile is None
    finally:
        gc.enable()
    assert t.events


def test_a_collected_profile_is_let_go():
    """An open graph of a profiled forward keeps no profile's events from going."""
    pipe = made()
    with pipe.profile() as t:
        out = pipe(torch.ones(8, 4))
    out.sum().backward()  # too late: the profile is over
    assert t.steps[0].forward_only
    check(t, "F")


def test_the_measured_figures_are_added_up():
    """Busy, bubble, step time and predictions, from the events themselves."""
    pipe = made()
    with pipe.profile() as t:
        step(pipe)
        step(pipe)
    busy = [sum(e.duration for e in t.actions() if e.lane == n) / 2 for n in range(STAGES)]
    spans = [
        max(e.end for e in t.actions(n)) - min(e.start for e in t.actions(n)) for n in range(2)
    ]
    assert t.busy() == pytest.approx(busy)
    assert t.step_time == pytest.approx(sum(spans) / 2)
    assert t.bubble() == pytest.approx(1 - 2 * sum(busy) / (STAGES * sum(spans)))
    assert t.imbalance() == pytest.approx(max(busy) * STAGES / sum(busy))
    measured = bp.simulate(t.steps[-1].schedule, t.costs())
    assert t.predicted().step_time == pytest.approx(measured.makespan)
    estimated = bp.simulate(t.steps[-1].schedule, t.steps[-1].costs)
    assert t.predicted(measured=False).bubble() == pytest.approx(estimated.bubble)
    assert f"{1e3 * measured.makespan:.2f} ms" in str(t)
    assert f"{1e3 * t.step_time:.2f} ms" in str(t)


def test_a_profile_of_nothing_says_so():
    """Nothing ran in it."""
    pipe = made()
    with pipe.profile() as t:
        pass
    assert str(t) == "nothing ran: an empty timeline"


def test_a_call_that_is_refused_is_no_step():
    """It changes nothing in the profile."""
    pipe = made()
    with pipe.profile() as t:
        with pytest.raises(UsageError, match="loss_fn"):
            pipe.forward_backward(torch.ones(8, 4), target=torch.ones(8, 4))
        step(pipe)
    check(t)


# --- an accelerator, by hand: streams that note when they come to what


class FakeStream:
    """A queue of one device: its time goes on by what is put on it."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.time = 0.0


class FakeEvent:
    """Knows its stream's time where it was recorded; asked for its time before, it fails."""

    def __init__(self, device, *, enable_timing=False):
        assert enable_timing
        self.device, self.at = device, None

    def record(self, stream):
        assert stream.device == self.device
        self.at = stream.time

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, end):
        assert self.device == end.device
        return 1e3 * (end.at - self.at)


@pytest.mark.cpu("its streams are made up")
def test_device_times_are_those_of_streams(monkeypatch):
    """An action's start and end are its stream's; a wait on the stream is a stall, and no work; a
    copy is on its own streams. Devices with clocks of their own share an axis."""
    from blockpipe.reports.timeline import profiling

    streams = {torch.device("cuda", n): FakeStream(f"cuda:{n}") for n in range(2)}
    copies = {torch.device("cuda", n): FakeStream(f"cuda:{n}") for n in range(2)}
    for stream in (streams, copies):
        stream[torch.device("cuda:1")].time = 1000.0  # its clock began earlier
    waited = []
    monkeypatch.setattr(profiling, "current_stream", streams.get)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(profiling.time, "perf_counter_ns", lambda: 5 * 10**9)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = bp.Pipeline(bp.begin_blocks(model, {"1": 1}), devices=stages(2), chunks=1)
    pipe.forward_backward(torch.ones(2, 4), loss_fn=torch.sum)
    prepared = next(iter(pipe._preparer.known.values()))
    prepared.devices = list(streams)
    prepared.lane_of_stage = prepared.devices
    zero, one = streams.values()

    timeline = bp.Timeline()
    profile = Profile(timeline)
    observer: Observer = profile.step(prepared, 1)
    assert waited == list(streams)
    observer.begins("F", 0, 0, 0)
    zero.time += 3
    observer.ends("F", 0, 0)
    observer.begins("F", 1, 1, 0)  # queued at once: its stream stands still for the copy
    watch = observer.watch(torch.ones(4), 0, 1, 0)
    copies[torch.device("cuda:0")].time = zero.time
    watch("sends", copies[torch.device("cuda:0")])
    copies[torch.device("cuda:1")].time = 1000 + zero.time + 1
    watch("arrives", copies[torch.device("cuda:1")])
    watch("waits", one)
    one.time = 1004.0
    watch("goes on", one)
    one.time += 2
    observer.ends("F", 1, 0)
    assert waited == list(streams)  # a step waits for nothing
    profile.close()
    found = {e.kind + str(e.hop): pytest.approx((e.start, e.end)) for e in timeline.events}
    assert found == {"F0": (0, 3), "F1": (0, 6), "copy1": (3, 4), "stall1": (0, 4)}
    assert timeline.busy() == pytest.approx([3, 2])
    assert timeline.bubble() == pytest.approx(1 - 5 / 12)
    assert [lane.name for lane in timeline.lanes] == ["cuda:0", "cuda:1"]
    assert timeline.costs().transfer == pytest.approx([1.0, 0.0])
