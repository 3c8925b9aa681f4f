"""Plans as text, in JSON and in one line, and their differences."""

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import PlanError

from ..compat.keras.assigned_models import net_of

X = torch.ones(6, 4)


# --- plans as text


def test_version_1_is_read():
    """JSON of before is a plan, without kinds or nesting."""
    entry = '{"path": "stem", "call": 0, "stage": 0}'
    plan = bp.StagePlan.from_json(f'{{"version": 1, "assignments": [{entry}]}}')
    assert plan == bp.StagePlan([bp.Assignment("stem", 0, 0)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 3, "assignments": []}', "version 3 is unknown"),
        ('{"assignments": [{"path": 1, "call": 0, "stage": 0}]}', "entry 0 has path 1, call 0"),
        (
            '{"assignments": [{"path": "a", "call": "x", "stage": 0}]}',
            "entry 0 has path 'a', call 'x'",
        ),
        (
            '{"assignments": [{"path": "a", "call": -1, "stage": 0}]}',
            "entry 0 has path 'a', call -1",
        ),
        (
            '{"assignments": [{"path": "a", "call": 0, "stage": 0, "inside": [{}]}]}',
            "expected a plan .*'path'",
        ),
    ],
)
def test_json_that_is_no_plan_names_the_entry(text, message):
    """The entry is named."""
    with pytest.raises(PlanError, match=f"(?s){message}"):
        bp.StagePlan.from_json(text)


@pytest.mark.parametrize(
    ("text", "position"),
    [("=1", 0), ("a=1,b", 4), ("a=1 b=2", 0), ("a#x=1", 0), ("a=-1", 0), ("a=1,,b=2", 4)],
)
def test_a_layout_that_cannot_be_read_names_the_position(text, position):
    """The message has the position."""
    with pytest.raises(PlanError, match=f"for position {position} of the layout"):
        bp.StagePlan.from_layout(text)


def test_layouts_are_read_with_patterns_calls_and_spaces():
    """Empty, patterns, numbers of calls, spaces, and no text at all."""
    assert bp.StagePlan.from_layout("") == bp.StagePlan()
    assert bp.StagePlan.from_layout("  a =1 , b#2= 2 ").layout == "a=1, b#2=2"
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert bp.record(net, X, plan=bp.StagePlan.from_layout("[1-2]=1, 3=2")).route == [0, 1, 2]
    with pytest.raises(PlanError, match="expected text .* for a layout"):
        bp.StagePlan.from_layout(None)


def test_a_layout_can_begin_on_another_stage():
    """Stage 1 first, then 0."""
    recording = bp.record(net_of(), X, plan=bp.StagePlan.from_layout("stem=1, body=0"))
    assert recording.route == [1, 0]
    assert recording.plan.layout == "stem=1, body=0"


def test_differences_between_plans_are_listed():
    """Calls in one only, other classes, another order; nothing between equals."""
    plan = bp.record(net_of(), X).plan
    assert plan.differences(bp.record(net_of(), X)) == []
    other = nn.Sequential(nn.Linear(4, 4))
    other.add_module("stem", nn.Tanh())
    other.add_module("head", nn.Linear(4, 4))
    other.add_module("body", nn.Linear(4, 4))
    assert plan.differences(bp.record(other, X)) == [
        "'body.0' call 0: only in this plan",
        "'body.1' call 0: only in this plan",
        "'body.2' call 0: only in this plan",
        "'0' call 0: only in the other",
        "'stem' call 0: Linear in this plan, Tanh in the other",
        "'body' call 0: Sequential in this plan, Linear in the other",
        "'body' call 0 in this plan, but 'head' call 0 in the other at its place",
    ]
    assert bp.StagePlan.from_layout("body.*=1").differences(plan) == []
    assert bp.StagePlan.from_layout("bady=1").differences(plan) == ["'bady': only in this plan"]


def test_an_explicit_plan_says_what_differs():
    """A plan of a longer model: calls that are not made, and the rest."""
    linear = nn.Linear(4, 4)
    plan = bp.record(nn.Sequential(linear, linear, nn.ReLU()), X).plan
    with pytest.raises(PlanError, match=r"'0' call 1: only in the plan.*'2' call 0: ReLU in the"):
        bp.record(nn.Sequential(linear, nn.ReLU(), nn.Tanh()), X, plan=plan)
