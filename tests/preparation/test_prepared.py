"""What is decided once for a recording: lanes, schedules, and whether threads pay."""

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import ScheduleError, StateError
from blockpipe.preparation import prepared, schedule_choice
from blockpipe.schedules.builders import make_schedule

from ..models import linears, square
from ..parity import assert_same_gradients, difference, plain_step
from ..stage_devices import assert_close, equal, stages

CONSTANTS = {name: getattr(prepared, name) for name in ("SMALL_OPERATION", "SMALL_HOP")}


class Threads(nn.Module):
    """Notes the threads that its forward runs in."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x):
        self.seen.add(threading.current_thread().name)
        return x


def watched(stages=2, width=4):
    net = linears(stages, width)
    return net.append(Threads()), net[-1]


# --- whether threads pay


@pytest.mark.cpu("whether threads pay is a matter of the CPU")
@pytest.mark.parametrize("constant", ["SMALL_OPERATION", "SMALL_HOP"])
def test_small_models_run_in_the_callers_thread(constant, monkeypatch):
    """Small operations, or short hops: from the first step on, and the summary says so."""
    monkeypatch.setattr(prepared, constant, 1.0)
    net, seen = watched()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for _ in range(3):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same
    assert seen.seen == {threading.current_thread().name}
    assert "operations are small: steps run in one thread" in str(pipe.summary())


@pytest.mark.cpu("whether threads pay is a matter of the CPU")
def test_small_models_return_outputs_in_every_step(monkeypatch):
    """From the second step on it is the plain loop, whose outputs are joined as well: they failed."""
    monkeypatch.setattr(prepared, "SMALL_OPERATION", 1.0)
    net = linears(2)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    x = torch.randn(5, 4)
    for _ in range(3):
        result = pipe.forward_backward(x, loss_fn=square, return_outputs=True)
        torch.testing.assert_close(result.outputs, net(x))


@pytest.mark.every
@pytest.mark.parametrize(("width", "rows", "are_lanes"), [(1024, 512, True), (16, 16, False)])
def test_large_models_run_on_lanes_and_small_ones_do_not(width, rows, are_lanes, monkeypatch):
    """By the constants as they are, which other tests set to zero."""
    for name, constant in CONSTANTS.items():
        monkeypatch.setattr(prepared, name, constant)
    net, seen = watched(2, width)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    with torch.no_grad():
        pipe(torch.zeros(2 * rows, width))
    assert (threading.current_thread().name not in seen.seen) == are_lanes


def test_stages_that_share_a_lane_run_in_one_thread():
    """Two stages named ``cpu:0`` are one lane: nothing can overlap."""
    net, seen = watched()
    pipe = bp.Pipeline(net, devices=["cpu:0", "cpu:0"], chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
    assert seen.seen == {threading.current_thread().name}
    shared = bp.Pipeline(net, devices=["cpu:0", "cpu:1"], chunks=4)
    seen.seen.clear()
    shared.forward_backward(torch.randn(8, 4), loss_fn=square)
    assert threading.current_thread().name not in seen.seen


class Leaks(nn.Module):
    """Keeps a tensor with a graph for the next micro-batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.before = None

    def forward(self, x):
        with bp.Block(0):
            x = self.layers[0](x)
        with bp.Block(1):
            x = self.layers[1](x)
            if self.before is not None:
                x = x + self.before
            self.before = x
            return x


def test_the_first_step_of_a_small_model_is_cut(monkeypatch):
    """What would not bear several devices is found on a laptop too."""
    monkeypatch.setattr(prepared, "SMALL_HOP", 1.0)
    pipe = bp.Pipeline(Leaks(), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match="belongs to micro-batch 0 of this step"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


@pytest.mark.cpu("whether threads pay is a matter of the CPU")
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_one_thread_has_no_bubble(monkeypatch, schedule):
    """It is always busy: balance, the summary, find_chunks and a profile agree."""
    monkeypatch.setattr(prepared, "SMALL_HOP", 1.0)
    net, x = linears(2), torch.randn(8, 4)
    plan = bp.balance(net, x[:2], 2, chunks=4, schedule=schedule, measure=False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    summary = pipe.summary(x)
    found = summary.prediction
    assert found.one_thread
    assert plan.bubble == 0
    assert found.bubble == pytest.approx(0)
    assert found.step_seconds == pytest.approx(plan.step_seconds)
    assert "A step of 4 micro-batches in one thread: predicted" in str(summary)
    trials = pipe.find_chunks(x, loss_fn=square, candidates=[1, 4], repeats=1).trials
    assert [trial.bubble for trial in trials] == pytest.approx([0, 0])
    with pipe.profile() as timeline:
        pipe.forward_backward(x, loss_fn=square)
    assert [lane.name for lane in timeline.lanes] == ["cpu, stage 0, 1"]
    assert timeline.predicted(measured=False).bubble() == pytest.approx(0)


@pytest.mark.cpu("the prediction is the CPU's")
def test_lanes_in_turns_idle():
    """Operations that are not small could run beside each other: "sequential" gives that up."""
    pipe = bp.Pipeline(linears(2), devices=stages(2), chunks=4, schedule="sequential")
    found = pipe.summary(torch.randn(8, 4)).prediction
    assert not found.one_thread
    assert found.bubble == pytest.approx(0.5, abs=0.1)


def test_a_failure_in_the_plain_loop_is_noted(monkeypatch):
    """With stage, micro-batch and line, as in the cut engine."""
    monkeypatch.setattr(prepared, "SMALL_HOP", 1.0)

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 6:
                raise ValueError("the second step's second micro-batch")
            return x

    net = linears(2)
    net = net.append(Fails())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
    assert bp.current_stage() is None
    with pytest.raises(ValueError, match="the second step") as caught:
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
    assert "in the forward of micro-batch 1 on stage 1, at " in caught.value.__notes__[0]
    assert bp.current_stage() is None
    assert bp.current_microbatch() is None


# --- schedules


def test_a_schedule_of_ones_own():
    """A value, a CSV, or a function where the number of micro-batches varies."""
    x = torch.randn(8, 4)
    text = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1I1,1W1,1F2,1B2,1F3,1B3\n"
    seen = []

    def by_function(lane_of_hop, microbatches):
        seen.append((tuple(lane_of_hop), microbatches))
        return make_schedule("gpipe", lane_of_hop, microbatches)

    for schedule in (make_schedule("gpipe", [0, 1], 4), bp.Schedule.from_csv(text), by_function):
        net = linears(2)
        plain = copy.deepcopy(net)
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
        assert difference(net, plain, loss, expected).same
    pipe.forward_backward(x[:3], loss_fn=square)
    assert seen == [((0, 1), 4), ((0, 1), 3)]


def step(schedule, devices=("cpu", "cpu"), chunks=2, rows=4, **options):
    net = linears(len(devices))
    pipe = bp.Pipeline(net, devices=list(devices), chunks=chunks, schedule=schedule, **options)
    pipe.forward_backward(torch.randn(rows, 4), loss_fn=square)
    return pipe


def test_a_schedule_that_does_not_fit_is_refused():
    """Before anything runs: hops, micro-batches, lanes, the limit, what a function returns."""
    good = make_schedule("gpipe", [0, 1], 2)
    with pytest.raises(
        ScheduleError, match=r"is for 2 micro-batches, but chunks=3 \(.*; pass chunks=2"
    ):
        step(good, chunks=3)
    with pytest.raises(ScheduleError, match="hops and 3 micro-batches, got .* and 4 micro-batches"):
        step(make_schedule("gpipe", [0, 1], 4), chunks=4, rows=3)
    with pytest.raises(
        ScheduleError, match=r"a schedule for 3 hops and 2 micro-batches, got 'gpipe' for 2 hops"
    ):
        step(good, devices=stages(3))
    with pytest.raises(ScheduleError, match="has 2 micro-batches in flight, but in_flight=1"):
        step(good, in_flight=1)
    with pytest.raises(ScheduleError, match="a Schedule for the result of the function .*, got"):
        step(lambda lanes, microbatches: "gpipe")
    backwards = tuple(lane[::-1] for lane in good.lanes)
    impossible = bp.Schedule("mine", (0, 1), 2, backwards)
    with pytest.raises(ScheduleError, match=r"deadlocks: lane 0, entry 0 \(B0.1\) needs"):
        step(impossible)
    with pytest.raises(ScheduleError, match="a Schedule for the result of the function .*, got"):
        step(lambda lanes, n: "1f1b", chunks=1)
    with pytest.raises(ScheduleError, match="expected a positive integer or None for in_flight"):
        step("1f1b", in_flight=0)


def test_a_stage_has_one_lane():
    """A route that returns to a stage: both of its hops are on one lane."""

    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer, stage in zip(self.layers, (0, 1, 0), strict=True):
                with bp.Block(stage):
                    x = layer(x)
            return x

    pipe = bp.Pipeline(
        Returns(), devices=stages(2), chunks=2, schedule=make_schedule("gpipe", [0, 1, 2], 2)
    )
    with pytest.raises(ScheduleError, match="has hops 0 and 2 on lanes 0 and 2, but both are on"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_in_flight_bounds_the_forwards_under_way(schedule, limit):
    """Counted by the model: forwards begun, less backwards that are back at the start."""
    begun_or_back = []

    class Counts(nn.Module):
        def forward(self, x):
            begun_or_back.append(1)
            return x

    def back(parameter):
        begun_or_back.append(-1)

    net = linears(3)
    net[0].weight.register_post_accumulate_grad_hook(back)
    net.insert(0, Counts())
    net = bp.begin_blocks(bp.remove_blocks(net), {"2": 1, "3": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=6, schedule=schedule, in_flight=limit)
    pipe.forward_backward(torch.randn(12, 4), loss_fn=square)
    begun_or_back.clear()
    pipe.forward_backward(torch.randn(12, 4), loss_fn=square)
    under_way = [*itertools.accumulate(begun_or_back)]
    assert under_way[-1] == 0
    assert max(under_way) <= limit


def test_the_summary_says_why_auto_chose():
    """The summary has the choice and what the others would have taken."""
    pipe = step("auto", devices=stages(4), chunks=8, rows=16)
    note = next(
        line for line in str(pipe.summary()).splitlines() if "auto (8 micro-batches)" in line
    )
    assert "% bubble predicted" in note
    assert "× its time" in note


def test_the_static_part_is_made_once(monkeypatch):
    """A second step of the same size makes no schedule, and one in more micro-batches does."""
    pipe, made = step("1f1b"), []

    def make(*args, **options):
        made.append(args)
        return make_schedule(*args, **options)

    monkeypatch.setattr(schedule_choice, "make_schedule", make)
    pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    assert not made
    pipe.chunks = 4
    pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    assert len(made) == 1


def test_inference_streams_in_order():
    """Under no_grad more micro-batches than stages go through, and results come in order."""
    net = linears(3)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=16)
    x = torch.randn(33, 4)
    with torch.no_grad():
        for _ in range(3):
            assert equal(
                pipe(x),
                torch.cat([plain(part) for part in (x[:3], *x[3:].split(2))]),
            )


def test_a_schedule_of_ones_own_is_never_anothers():
    """A new function each step: each step plays what its own gives, and no more than one is kept."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = bp.Pipeline(bp.begin_blocks(net, {"1": 1}), devices=stages(2), chunks=4)
    for name in ["gpipe", "zb-h1", "1f1b", "gpipe"] * 3:
        pipe.schedule = lambda lanes, chunks, name=name: make_schedule(name, lanes, chunks)
        pipe.forward_backward(torch.randn(8, 8), loss_fn=square)
        (prepared,) = pipe._preparer.known.values()
        assert prepared.schedule(pipe.schedule, 4) == make_schedule(name, prepared.lane_of_hop, 4)
        assert len(prepared._schedules) == 1


class ByCall(nn.Module):
    """Reads some of its parameters by what a call asks for, and on which stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.late, self.moves = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("factor", torch.full((4,), 2.0))

    def forward(self, x, kind=""):
        with bp.Block(0):
            x = self.a(x)
            if kind == "early":
                x = self.moves(x)
        with bp.Block(1):
            x = self.b(x)
            if kind == "late":
                x = self.moves(self.late(x) * self.factor)
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("kinds", ["- late - late", "early late early", "late early no_grad late"])
def test_parameters_live_where_the_call_at_hand_reads_them(kinds, schedule):
    """What an earlier kind of call did not read, or read on another stage, is moved."""
    net, x = ByCall(), torch.randn(6, 4)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule=schedule)
    grad = True
    for kind in kinds.split():
        if kind == "no_grad":
            grad = False
            continue
        with torch.set_grad_enabled(grad):
            outputs = [model(x, kind) for model in (pipe, plain)]
            assert_close(*outputs)
        if grad:
            for output in outputs:
                output.square().sum().backward()
    assert_same_gradients(net, plain)


def test_what_no_call_reads_is_on_its_modules_stage():
    """Else it would stay behind, on the host or on another device than the rest of its module."""
    net, x = ByCall(), torch.randn(6, 4)
    net.b.unread = nn.Parameter(torch.ones(4))
    bp.Pipeline(net, devices=stages(2), chunks=3)(x)
    assert net.b.unread.device == torch.device(stages(2)[1])


def test_what_a_call_does_not_read_stays_where_another_reads_it():
    """Else the other kind of call would be recorded anew each time."""
    net, x = ByCall(), torch.randn(6, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    pipe(x, "late")
    (late,) = pipe._preparer.known.values()
    pipe(x)
    assert late in pipe._preparer.known.values()
    assert net.late.weight.device == torch.device(stages(2)[1])


def test_gradients_from_before_the_placement_are_added_to():
    """They go where their parameters go, and come back with them."""
    net, x = linears(2), torch.randn(6, 4)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    for first in (net, plain):
        square(first(x)).backward()
    square(plain(x)).backward()
    pipe.forward_backward(x, loss_fn=square)
    assert {p.grad.device for p in net.parameters()} == {torch.device(d) for d in stages(2)}
    assert_same_gradients(net, plain)
    pipe.unplace()
    assert {p.grad.device.type for p in net.parameters()} == {"cpu"}
