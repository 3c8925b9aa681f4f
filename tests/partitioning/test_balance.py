"""Balance: the best cut of any model, and that it can be carried out."""

import copy
import math
import threading
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.costs.rates import STATED_CPU
from blockpipe.errors import MarkError, PlanError, ScheduleError, UsageError
from blockpipe.preparation import prepared

from ..parameter_sets import every_pair
from ..parity import any_loss, difference, plain_step
from ..stage_devices import assert_close, equal, examples, stages
from ..strategies import Program, programs
from .balanced_models import Skips, chain


def _plan_at(recording: bp.Recording, begins: tuple[int, ...]) -> bp.StagePlan:
    """Every call's stage, if stages begin with these pieces."""
    found = []
    for segment in recording.segments:
        for call in map(recording.calls.__getitem__, segment.calls):
            if call.is_module:
                stage = sum(begin <= segment.index for begin in begins)
                found.append(bp.Assignment(call.path, call.call, stage))
    return bp.StagePlan(found)


def _of_recording(recording: bp.Recording, by: str, speeds: list[float]) -> tuple[float, float]:
    """The costliest stage, and the bytes that cross: from the recording with its stages."""
    costs = []
    for stage in range(recording.num_stages):
        if by == "flops":
            cost = sum(h.flops for h in recording.hops if h.stage == stage)
        elif by == "parameters":
            cost = float(sum(p.bytes for p in recording.parameters if p.stage == stage))
        else:
            hops = [h for h in recording.hops if h.stage == stage]
            cost = sum(STATED_CPU.forward(h.work) + STATED_CPU.backward(h.work) for h in hops)
        costs.append(cost / speeds[stage])
    crossing = sum(c.bytes for c in recording.crossings if c.from_stage != c.to_stage)
    return max(costs), float(crossing)


@pytest.mark.slow
@every_pair(
    by=["flops", "parameters", "time"],
    stages=[2, 3],
    speeds=[None, [1.0, 2.0, 0.7]],
)
def test_no_other_cut_is_better(by: str, stages: int, speeds: list[float] | None) -> None:
    """Every cut of a model with skips is recorded and compared: cost first, then bytes that cross."""
    net, x = Skips(), torch.zeros(4, 8)
    speeds = None if speeds is None else speeds[:stages]
    plan = bp.balance(net, x, stages, by, measure=False, speeds=speeds, slack=0.0)
    whole = bp.record(net, x, plan=bp.StagePlan([]))
    found = _of_recording(bp.record(net, x, plan=plan), by, speeds or [1.0] * stages)
    others = []
    for begins in combinations(range(1, len(whole.segments)), stages - 1):
        recording = bp.record(net, x, plan=_plan_at(whole, begins))
        assert recording.route == list(range(stages))
        others.append(_of_recording(recording, by, speeds or [1.0] * stages))
    least = min(cost for cost, _ in others)
    assert found[0] == pytest.approx(least, rel=1e-9)
    assert found[1] == min(n for cost, n in others if cost <= least * (1 + 1e-9))
    assert found[0] == pytest.approx(max(share.cost for share in plan.shares), rel=1e-9)


@settings(deadline=None, max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(programs, st.integers(1, 4), st.sampled_from(["flops", "parameters", "time", "memory"]))
def test_random_programs_are_cut_as_planned_and_train_as_plain(
    instructions: list, count: int, by: str
) -> None:
    """Whatever comes back records to the stages 0, 1, …, in order, and trains to the bit, isolated."""
    torch.manual_seed(0)
    net = Program(instructions)
    args = torch.randn(6, 4), torch.randint(4, (6,))
    reference = copy.deepcopy(net)
    try:
        # Of copies: a program may write to what it is given.
        plain = plain_step(reference, copy.deepcopy(args), {}, None, any_loss, 3)
    except RuntimeError:
        return  # the program itself writes to what its backward needs
    try:
        plan = bp.balance(net, args, count, by, measure=False)
    except PlanError as error:
        assert "can be cut at" in str(error)
        return
    recording = bp.record(net, args, plan=plan)
    assert recording.route == list(range(count))
    assert [a.stage for a in plan.assignments] == [a.stage for a in recording.plan.assignments]
    assert recording.plan.stages() == plan.stages()
    with bp.Pipeline(net, devices=stages(count), chunks=3, plan=plan, isolate=True) as pipe:
        loss = pipe.forward_backward(*args, loss_fn=any_loss).loss
    assert difference(net, reference, loss, plain).same


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(programs, st.integers(1, 4), st.booleans())
def test_random_programs_need_the_memory_that_was_balanced(
    instructions: list, count: int, on_one_device: bool
) -> None:
    """To the byte what the pipeline predicts, with skips, several calls and views too."""
    net = Program(instructions)
    args = torch.randn(6, 4), torch.randint(4, (6,))
    devices = ["cpu"] * count if on_one_device else [f"cpu:{n}" for n in range(count)]
    options: dict[str, Any] = {"devices": devices, "chunks": 3}
    micro = tuple(a[:2] for a in args)
    try:
        plan = bp.balance(net, micro, count, "memory", optimizer="adam", **options)
    except PlanError as error:
        assert "can be cut at" in str(error)
        return
    with bp.Pipeline(net, plan=plan, **options) as pipe:
        report = pipe.memory(*args, optimizer="adam")
    assert [share.memory for share in plan.shares] == [stage.peak for stage in report.stages]


@pytest.mark.parametrize("by", ["time", "memory", "parameters", "flops"])
def test_what_the_table_says_is_what_the_recording_with_the_plan_has(by: str) -> None:
    """Parameters, bytes received, seconds: stage by stage, of a real model."""
    net, x = torchvision.models.resnet18(), torch.zeros(2, 3, 64, 64)
    plan = bp.balance(net, x, 3, by, measure=False, optimizer="adam", chunks=4, slack=0)
    recording = bp.record(net, x, plan=plan)
    for share in plan.shares:
        here = [p for p in recording.parameters if p.stage == share.stage]
        assert share.parameters == sum(p.bytes for p in here)
        assert share.elements == sum(p.elements for p in here)
        to = [c for c in recording.crossings if c.to_stage == share.stage != c.from_stage]
        assert share.received == sum(c.bytes for c in to)
        hop = recording.hops[share.stage]
        assert share.forward == pytest.approx(STATED_CPU.forward(hop.work))
        assert share.backward == pytest.approx(STATED_CPU.backward(hop.work))
    assert sum(share.elements for share in plan.shares) == sum(p.numel() for p in net.parameters())
    assert plan.imbalance == pytest.approx(
        max(s.cost for s in plan.shares) / (sum(s.cost for s in plan.shares) / 3)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
@pytest.mark.parametrize("devices", [stages(3), ["cpu:0", "cpu:1", "cpu:2"]], ids=str)
def test_the_memory_is_what_the_pipeline_predicts(schedule: str, devices: list[str]) -> None:
    """Which plays the same out stage by stage. What several devices save counts on each of them."""
    net, x = torchvision.models.resnet18(), torch.zeros(16, 3, 64, 64)
    options: dict[str, Any] = {"devices": devices, "chunks": 4, "schedule": schedule}
    plan = bp.balance(net, x[:4], 3, "memory", optimizer="adam", **options)
    pipe = bp.Pipeline(net, plan=plan, **options)
    for share, stage in zip(plan.shares, pipe.memory(x, optimizer="adam").stages, strict=True):
        assert share.memory == stage.peak


@pytest.mark.cpu("only stages on the CPU are run by one thread")
def test_the_memory_of_a_small_model_is_that_of_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU its steps hold one micro-batch at a time, whatever the schedule is."""
    monkeypatch.setattr(prepared, "SMALL_HOP", 1.0)
    net, x = chain(8, 8, 8, 8), torch.zeros(64, 8)
    plan = bp.balance(net, x[:8], 3, "memory", chunks=8)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=8, plan=plan)
    assert [s.memory for s in plan.shares] == [s.peak for s in pipe.memory(x).stages]
    assert any("one thread" in note for note in plan.notes)


def test_a_limit_moves_the_cut() -> None:
    """The first stage has room for one layer of three only."""
    net, x = chain(8, 8, 8, 8), torch.zeros(2, 8)
    free = bp.balance(net, x, 2, "parameters", slack=1.0)
    tight = min(share.memory for share in free.shares)
    limits = [tight, 10**6]
    plan = bp.balance(net, x, 2, "flops", limits=limits)
    assert plan.shares[0].memory <= tight
    assert [s.limit for s in plan.shares] == limits
    assert plan.shares[1].begins == "1"


def test_a_limit_that_nothing_keeps_to_says_which_and_how_much_is_missing() -> None:
    net, x = chain(64, 64, 64, 64), torch.zeros(2, 64)
    with pytest.raises(PlanError, match=r"needs [\d.]+ KiB, [\d.]+ KiB more than its 20.0 KiB"):
        bp.balance(net, x, 2, "flops", limits=20 * 1024)
    with pytest.raises(PlanError, match=r"in the best one, stage 1 \(from 2\) needs"):
        bp.balance(net, x, 2, "flops", limits=[10**9, 20 * 1024])


@given(
    first=st.sampled_from([0, 100, 5000, 10**6]),
    last=st.sampled_from([0, 100, 5000, 10**6]),
    widths=st.lists(st.sampled_from([4, 16, 32]), min_size=4, max_size=7),
)
@settings(deadline=None, max_examples=examples(20))
def test_the_costs_of_first_and_last_stage_count(first: int, last: int, widths: list[int]) -> None:
    """By parameters, against every partition of the chain."""
    net = chain(*widths)
    sizes = [sum(p.numel() * 4 for p in layer.parameters()) for layer in net]

    def worst(cuts: tuple[int, ...]) -> float:
        parts = [sum(sizes[a:b]) for a, b in pairwise((0, *cuts, len(sizes)))]
        return max([parts[0] + first, *parts[1:-1], parts[-1] + last])

    plan = bp.balance(
        net, torch.zeros(2, widths[0]), 3, "parameters", first=first, last=last, slack=0
    )
    best = min(map(worst, combinations(range(1, len(sizes)), 2)))
    assert max(share.cost for share in plan.shares) == best


def test_crossings_cost_time_where_devices_are_slow_to_reach() -> None:
    """A cut where little crosses is taken, though the stages are less even."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(256, n) for n in (256, 256, 1))
            self.d = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(self.b(self.a(x))))

    net, x = Net(), torch.zeros(64, 256)
    assert bp.balance(net, x, 2, measure=False).shares[1].begins == "b"
    slow = bp.balance(net, x, 2, measure=False, bandwidth=1e6)
    assert slow.shares[1].begins == "d"
    assert slow.shares[1].received == 64 * 4


class Twice(nn.Module):
    """A buffer that is written in two places, with layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


def test_a_buffer_that_is_written_is_not_torn_apart() -> None:
    net, x = Twice(), torch.zeros(4, 4)
    assert bp.balance(net, x, 2, "flops").shares[1].begins in ("norm", "c")
    with pytest.raises(
        PlanError,
        match=r"at 2 places, into at most 3 stages.*buffer norm.num_batches_tracked is",
    ):
        bp.balance(net, x, 4, "flops")


def test_more_stages_than_places_to_cut_are_refused() -> None:
    with pytest.raises(PlanError, match=r"can be cut at 2 places, into at most 3 stages"):
        bp.balance(chain(4, 4, 4, 4), torch.zeros(2, 4), 4, "flops")


def test_a_function_is_no_place_to_cut() -> None:
    """A plan names calls of modules; a piece that a block function begins alone is left whole."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return tail(self.a(x))

    @bp.BlockFunction(stage=1)
    def tail(x: Tensor) -> Tensor:
        return x.tanh()

    with pytest.raises(PlanError, match="no module's call begins there, and a plan names modules"):
        bp.balance(Net(), torch.zeros(2, 4), 2, "flops")


def test_a_call_after_one_in_a_sealed_module_is_where_the_plan_has_it() -> None:
    """Calls are counted inside of sealed modules too, where nothing else is looked at."""
    seen = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(bp.current_stage())
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = Layer(8, 8)
            self.body = nn.Sequential(nn.Linear(8, 8), self.act)
            self.end = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.act(self.body(x)))

    net, x = Net(), torch.ones(4, 8)
    plan = bp.balance(net, x, 2, "flops")
    assert [plan.stages()["act", call] for call in (0, 1)] == [0, 1]
    with bp.Pipeline(net, devices=stages(2), chunks=2, plan=plan, sample=(x,)) as pipe:
        seen.clear()
        pipe.forward_backward(x, loss_fn=torch.sum)
    assert sorted(seen) == [0, 0, 1, 1]


def test_one_stage_is_the_whole_model() -> None:
    plan = bp.balance(chain(4, 4, 4), torch.zeros(2, 4), 1, "flops")
    assert plan.num_stages == 1
    assert plan.marks() == ""
    assert "cannot" not in str(plan)


def test_the_outermost_module_is_named() -> None:
    net = torchvision.models.resnet18()
    plan = bp.balance(net, torch.zeros(2, 3, 64, 64), 3, "flops")
    assert [share.begins for share in plan.shares] == ["the start", "layer2", "layer3.1"]


def test_the_model_is_left_as_it_was() -> None:
    """Parameters, gradients, buffers, modes, attributes, random state; and its marks stay."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    net[3] = bp.BeginBlock(net[3], stage=1)
    net[0].weight.grad = torch.ones(4, 4)
    gradient, before = net[0].weight.grad, copy.deepcopy(net.state_dict())
    attributes = [dict(m.__dict__) for m in net.modules()]
    random = torch.get_rng_state()
    bp.balance(net, torch.ones(4, 4), 2)
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert net[0].weight.grad is gradient
    assert equal(gradient, torch.ones(4, 4))
    assert net[3].weight.grad is None
    assert [m.__dict__.keys() for m in net.modules()] == [a.keys() for a in attributes]
    assert net.training
    assert equal(torch.get_rng_state(), random)
    assert bp.record(net, torch.zeros(4, 4)).route == [0, 1]


def test_a_meta_model_is_estimated() -> None:
    with torch.device("meta"):
        net = chain(256, 256, 256, 256)
    plan = bp.balance(net, torch.zeros(4, 256, device="meta"), 3)
    assert "(estimated)" in str(plan)
    assert plan.num_stages == 3


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"by": "speed"}, UsageError, "one of 'time', 'memory', 'parameters', 'flops' for by, got 'speed'"),
        ({"by": ["time"]}, UsageError, "one of .* for by, got"),
        ({"stages": 0}, PlanError, "a positive integer for stages, got 0"),
        ({"stages": 2.0}, PlanError, "a positive integer for stages, got 2.0"),
        ({"chunks": 0}, PlanError, "a positive integer for chunks, got 0"),
        ({"repeats": 0}, PlanError, "a positive integer for repeats, got 0"),
        ({"speeds": [1.0]}, PlanError, "2 numbers for speeds, got 1"),
        ({"speeds": [1.0, 0.0]}, PlanError, r"a positive number for speeds\[1\], got 0.0"),
        ({"speeds": [1.0, math.nan]}, PlanError, r"a positive number for speeds\[1\], got nan"),
        ({"speeds": 2.0}, PlanError, "a list of numbers for speeds, got 2.0"),
        ({"speeds": [1, 2], "by": "memory"}, PlanError, "speeds= does not change the memory"),
        ({"limits": [1]}, PlanError, "2 numbers for limits, got 1"),
        ({"limits": -1}, PlanError, r"a positive number for limits\[0\], got -1"),
        ({"first": -1}, PlanError, "a finite number from 0 up for first, got -1"),
        ({"last": None}, PlanError, "a finite number from 0 up for last, got None"),
        ({"slack": "1"}, PlanError, "a finite number from 0 up for slack, got '1'"),
        ({"bandwidth": 0}, PlanError, "a positive number for bandwidth, got 0"),
        ({"devices": ["cpu"]}, PlanError, "expected 2 devices, one for each stage, .*got 1"),
        ({"devices": "cpu"}, PlanError, "expected a list with one device for each stage"),
        ({"optimizer": "adamm"}, UsageError, "expected a known optimizer"),
        ({"schedule": "2f2b"}, ScheduleError, "expected one of .* for schedule"),
        ({"target": torch.zeros(1)}, UsageError, "no loss_fn to compare it by"),
        ({"loss_fn": 3}, UsageError, "expected a callable .* for loss_fn"),
        ({"kwargs": [1]}, UsageError, "a mapping from names to values for kwargs"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(options: dict, kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        bp.balance(chain(4, 4, 4), torch.zeros(2, 4), **{"stages": 2, **options})


def test_a_pipeline_is_no_model() -> None:
    with pytest.raises(UsageError, match=r"the model itself for model, got Pipeline.*\.module"):
        bp.balance(bp.Pipeline(chain(4, 4)), torch.zeros(2, 4), 2)


def test_a_forward_that_fails_is_told_and_leaves_nothing_behind() -> None:
    net = chain(4, 4, 4)
    with pytest.raises(bp.BlockpipeError, match="forward fails on the sample"):
        bp.balance(net, torch.zeros(2, 5), 2)
    assert "forward" not in net[0].__dict__


def test_stages_begin_only_where_at_names_a_module() -> None:
    """By path patterns; what is named too rarely, or not at all, is an error."""
    blocks = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(3))
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 4))
    x = torch.zeros(2, 4)

    def begins(**options: Any) -> list[str]:
        plan = bp.balance(net, x, 2, by="parameters", slack=0, **options)
        return [share.begins for share in plan.shares]

    assert begins() == ["the start", "1.1.1"]
    assert begins(at="1.*") == ["the start", "1.1"]
    assert begins(at=["0", "2"]) == ["the start", "2"]
    with pytest.raises(
        PlanError, match="cut at 1 places.*at= names none of the modules that begin there"
    ):
        bp.balance(net, x, 3, by="parameters", at="2")
    with pytest.raises(MarkError, match="the path of a module, or a pattern of paths, got 'blocks"):
        begins(at="blocks.*")


def test_a_balance_while_another_thread_trains_the_model_takes_turns() -> None:
    """Attack 44: it measured while a step had doors on the modules, and either one failed."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), {"2": 1})
    x, over, failed = torch.randn(8, 8), threading.Event(), list[BaseException]()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)

    def train() -> None:
        try:
            while not over.is_set():
                pipe.forward_backward(x, target=x[:, :4], loss_fn=nn.functional.mse_loss)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            assert len(bp.balance(net, x[:2], 2).shares) == 2
    finally:
        over.set()
        thread.join()
    assert not failed
