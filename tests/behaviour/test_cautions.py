"""Marks that are never reached, and schedules and devices that gain nothing, are pointed out."""

import re
import warnings

import pytest
import torch
from torch import nn

import blockpipe as bp


class CallsOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.body(x), self.head.weight)


def test_a_mark_that_is_never_reached_is_told():
    """At the first step, once; the summary has it too, and does not say that nothing is marked."""
    net, x = CallsOne(), torch.ones(4, 4)
    bp.BeginBlock(net.head, stage=1)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    said = r"'head' is marked as stage 1 \(test_cautions.py:\d+\), but never called"
    with pytest.warns(UserWarning, match=said):
        pipe(x)
    pipe.eval()(x)  # is recorded anew, and does not warn again
    notes = "\n".join(bp.record(net, x).summary().notes)
    assert re.search(said, notes)
    assert "nothing is marked" not in notes
    assert "nothing is marked" in str(bp.record(bp.remove_blocks(net), x).summary())
    assert "the plan has one stage" in str(bp.record(net, x, plan=bp.StagePlan()).summary())


@pytest.mark.parametrize("marks", [{}, {"1": 1}])
def test_a_device_without_a_stage_is_told(marks):
    """By its name; a device that is named several times is in use."""
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(4, 4)
    names = ["cpu:0", "cpu:0", "cpu:1"] if marks else ["cpu:0", "cpu:1"]
    pipe = bp.Pipeline(bp.begin_blocks(net, marks), devices=names, chunks=2)
    with pytest.warns(UserWarning, match=f"cpu:1 has no stage: the forward has {1 + len(marks)} "):
        pipe(x)
    assert any("cpu:1 has no stage" in note for note in pipe.summary(x).notes)


def test_an_unmarked_model_on_several_devices_is_told():
    """On the CPU too, where a device without a number is a lane of its own for each stage."""
    pipe = bp.Pipeline(nn.Sequential(nn.Linear(4, 4)), devices=["cpu"] * 2, chunks=2)
    with pytest.warns(UserWarning, match="nothing is marked, for 2 devices; mark the model"):
        pipe(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("schedule", "twice"), [("interleaved", [0, 1, 0, 1]), ("zb-v", [0, 1, 1, 0])]
)
def test_a_schedule_for_several_stages_a_device_is_told_of_one(schedule, twice):
    """It gains nothing there; with each device named twice nothing is said."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x = torch.ones(4, 4)
    bp.begin_blocks(net, {"1": 1, "2": 2, "3": 3})
    once = bp.Pipeline(net, devices=[f"cpu:{n}" for n in range(4)], chunks=2, schedule=schedule)
    with pytest.warns(UserWarning, match=f"schedule='{schedule}' gains nothing over"):
        once(x)
    assert any("gains nothing" in note for note in once.summary(x).notes)
    pipe = bp.Pipeline(net, devices=[f"cpu:{n}" for n in twice], chunks=2, schedule=schedule)
    with warnings.catch_warnings(action="error"):
        pipe(x)
    assert not any("gains nothing" in note for note in pipe.summary(x).notes)
