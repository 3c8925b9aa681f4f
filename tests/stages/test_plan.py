"""Plans: data that survives JSON and is checked as a whole."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe import Assignment, StagePlan
from blockpipe.errors import PlanError

from ..models import square
from ..parity import plain_step
from ..stage_devices import examples

plans = st.lists(
    st.tuples(st.text("abc.0", min_size=1, max_size=5), st.integers(0, 2)), unique=True, max_size=6
).map(lambda keys: bp.StagePlan([bp.Assignment(p, c, i) for i, (p, c) in enumerate(keys)]))


@given(plans)
def test_a_plan_survives_json(plan):
    """What is read is what was written."""
    assert bp.StagePlan.from_json(plan.to_json()) == plan


def test_everything_wrong_is_said_at_once():
    """Gaps and too few devices, in one error."""
    plan = bp.StagePlan([bp.Assignment("a", 0, 0), bp.Assignment("b", 0, 3)])
    with pytest.raises(
        PlanError, match=r"\[1, 2\] are missing.*4 stages \(0..3\), but there are 2 devices"
    ):
        plan.check(devices=2)


def test_text_that_is_no_plan_is_refused():
    """The message shows what a plan looks like."""
    with pytest.raises(PlanError, match="expected a plan"):
        bp.StagePlan.from_json("[1]")


def test_assign_by_pattern_and_its_near_misses():
    """A pattern names modules and all inside them."""
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    plan = bp.record(net, torch.zeros(1, 2)).plan
    plan.assign("1", 1)
    assert [a.stage for a in plan.assignments if a.path == "1"] == [1]
    with pytest.raises(PlanError, match="expected the path of a module.* got '7'"):
        plan.assign("7", 1)


def test_a_plan_overrides_the_marks():
    """Marks are not followed under a plan, and gradients stay equal."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    twin = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    twin.load_state_dict(net.state_dict())
    net[1] = bp.BeginBlock(net[1], stage=1)
    x = torch.randn(6, 4)
    plan = bp.record(net, x).plan
    for path, stage in {"0": 0, "1": 0, "2": 1, "3": 2}.items():
        plan.assign(path, stage)
    pipe = bp.Pipeline(net, devices=["cpu"] * 3, chunks=3, plan=plan, isolate=True)
    pipe.forward_backward(x, loss_fn=square)
    assert pipe.recording.route == [0, 1, 2]
    plain_step(twin, (x,), {}, None, square, 3)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_plan_of_another_model_is_refused():
    """It names modules that are not there."""
    plan = bp.StagePlan([bp.Assignment("stem", 0, 0)])
    with pytest.raises(PlanError, match=r"assigns \['stem'\], which Linear does not have"):
        bp.record(nn.Linear(1, 1), torch.zeros(1, 1), plan=plan)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 10**5, "nested more than 200 deep"),
        (
            '{"version": 2, "version": 1, "assignments": []}',
            "one object has the name 'version' twice",
        ),
        ('{"assignments": [{"path": "a", "call": 0, "stage": %s}]}' % ("9" * 5000), "100 digits"),
        ('{"assignments": [{"path": "a", "call": 0, "stage": 1048576}]}', "0 to 1,048,575"),
    ],
)
def test_a_plan_beyond_a_bound_is_refused(text, why):
    """The error says the bound."""
    with pytest.raises(PlanError, match=why):
        StagePlan.from_json(text)


def test_a_plan_as_deep_as_the_bound_is_read():
    """Modules may be inside of each other as deep as the bound of JSON lets them."""
    entry = Assignment("a", 0, 0)
    for _ in range(98):
        entry = Assignment("a", 0, 0, inside=[entry])
    entries = list(entry.with_inside())
    for number, inner in enumerate(entries):
        inner.path = ".".join("a" * (number + 1))
    plan = StagePlan([entry])
    assert StagePlan.from_json(plan.to_json()) == plan


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
@settings(max_examples=examples(50), deadline=None)
def test_a_layout_is_text_to_paste(paths):
    """Whatever modules are called: it is read back, and ends no literal and no line."""
    plan = StagePlan([Assignment(path, 0, stage) for stage, path in enumerate(paths)])
    text = plan.layout
    back = StagePlan.from_layout(text) if len(paths) > 1 else StagePlan([], partial=True)
    assert [(a.path, a.stage) for a in back.assignments] == [
        (a.path, a.stage) for a in plan.assignments[1:]
    ]
    assert text.isprintable()
    assert not set(text) & set("'`$()")


def test_a_printed_plan_has_a_line_for_each_call():
    """A module's name may hold line breaks and escape characters."""
    assert str(StagePlan([Assignment("a\n\x1b[2Jb", 0, 0)])) == r"a\n\x1b[2Jb  call 0  stage 0"


@pytest.mark.parametrize("use", ["record", "Pipeline"])
def test_a_plan_saved_for_another_model_is_refused(use, tmp_path):
    """All of its modules are there, but the forward makes other calls; a list of beginnings fits."""
    layers = [nn.Linear(4, 4) for _ in range(5)]
    smaller, larger = nn.Sequential(*layers[:3]), nn.Sequential(*layers)
    x = torch.zeros(2, 4)
    plan = bp.record(smaller, x).plan
    plan.assign("2", 1)
    plan.save(tmp_path / "plan.json")
    loaded = bp.StagePlan.load(tmp_path / "plan.json")

    def route(plan):
        if use == "record":
            return bp.record(larger, x, plan=plan).route
        pipe = bp.Pipeline(larger, devices=["cpu"] * 2, chunks=2, plan=plan, sample=(x,))
        return pipe.recording.route

    with pytest.raises(PlanError, match="'3' call 0: only in the forward; '4' call 0: only in the"):
        route(loaded)
    assert route(bp.StagePlan.from_layout(loaded.layout)) == [0, 1]


def _by_marks(net, stages):
    return bp.Pipeline(bp.begin_blocks(net, stages), devices=["cpu"] * 3, chunks=2)


def _by_plan(net, stages):
    plan = bp.record(net, torch.zeros(2, 4)).plan
    for path, stage in stages.items():
        plan.assign(path, stage)
    return bp.Pipeline(net, devices=["cpu"] * 3, chunks=2, plan=plan)


def _by_assignment(net, stages):
    bp.set_pipeline_stage_assignment(net, stages)
    return bp.Pipeline(net, devices=["cpu"] * 3, chunks=2)


@pytest.mark.parametrize("staged", [_by_marks, _by_plan, _by_assignment])
def test_stages_are_numbered_as_they_are_reached_first(staged):
    """One rule, whatever numbers them; to return is fine."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with pytest.raises(PlanError, match=r"stage 2 begins .* before stage 1 has run; number stages"):
        staged(copy.deepcopy(net), {"1": 2, "2": 1})(torch.zeros(2, 4))
    pipe = staged(net, {"1": 1, "2": 0})
    pipe(torch.zeros(2, 4))
    assert pipe.recording.route == [0, 1, 0]
