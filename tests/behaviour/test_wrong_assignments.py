"""Assignments that are refused, and what is said of them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import PlanError, UsageError

from ..compat.keras.assigned_models import Part, net_of

X = torch.ones(6, 4)


# --- what is refused

LINE = r"(?:test_wrong_assignments|assigned_models)\.py:\d+"


def _entries() -> list[bp.Assignment]:
    return bp.get_pipeline_stage_assignment(net_of(), X)


def _changed(change) -> list[bp.Assignment]:
    entries = _entries()
    change(entries)
    return entries


def _stage(path: str, stage: object):
    def change(entries):
        for e in bp.StagePlan(entries).assignments:
            if e.path == path:
                e.stage = stage

    return change


AT_ONCE = {
    "None for an entry": (
        _changed(lambda e: e.insert(0, None)),
        r"entry 0 is None, but should be an Assignment",
    ),
    "no entry": ([1, "stem"], r"entry 0 is 1, but .*entry 1 is 'stem'"),
    "None for a stage": (
        _changed(_stage("body.1", None)),
        r"the stage of 'body.1' call 0, got None",
    ),
    "negative": (_changed(_stage("head", -1)), r"for the stage of 'head' call 0, got -1"),
    "bool": (_changed(_stage("head", True)), r"the stage of 'head' call 0, got True"),
    "float": (_changed(_stage("head", 1.0)), r"the stage of 'head' call 0, got 1.0"),
    "gap": (_changed(_stage("head", 2)), r"got \[0, 2\], where \[1\] are missing"),
    "too early": (
        _changed(lambda e: (e[0].assign(2), e[1].assign(1))),
        r"'stem' call 0 is on stage 2, before any call on stage 0",
    ),
    "twice": (_changed(lambda e: e.append(e[0])), r"'stem' call 0 is assigned twice"),
    "other class": (
        _changed(lambda e: setattr(e[0], "kind", "Conv2d")),
        r"'stem' call 0 is a Linear, but in the plan a Conv2d",
    ),
    "unknown path": ({"heed": 0}, r"assigns \['heed'\], which Sequential does not have; did you.*"),
    "stage of a pattern": ({"head": "1"}, r"for the stage of 'head', got '1'"),
    "no path": ({1: 1}, r"entry 0 is .* but should be an Assignment with a path"),
    "gap in a mapping": ({"head": 2}, r"got \[0, 2\], where \[1\] are missing"),
    "two patterns": ({"body.*": 0, "body.1": 1}, r"'body.1' is on stage 0, and by 'body.1' on"),
    "layout": ("head=1, body", r"for position 8 of the layout 'head=1, body', got 'body'"),
    "empty item": ("head=1,", r"for position 7 of the layout 'head=1,', got ''"),
    "no file at a path": (Path("nowhere.json"), r"^cannot read a plan from 'nowhere.json'"),
    "no file": ("nowhere.json", r"cannot read a plan from 'nowhere.json': .*No such file"),
    "the model itself": ({"": 1}, r"assigns \[''\], which Sequential does not have"),
    "a number far off": ({"head": 10**6}, r"where \[1, 2, 3, 4, 5, 6, 7, 8\] are missing"),
    "a number that is none": ("head=" + "9" * 5000, r"for position 0 of the layout 'head=9"),
    "negative call": ([bp.Assignment("stem", -1, 0)], r"entry 0 is .*the number of a call"),
    "wrong type": (3, r"a list of Assignment entries.* for assignment, got 3"),
    "None": (None, r"a list of Assignment entries.* for assignment, got None"),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_a_wrong_assignment_is_refused_at_once(what):
    """Without a sample, naming the call and the line; nothing is set."""
    net = net_of()
    assignment, message = AT_ONCE[what]
    with pytest.raises(PlanError, match=f"(?s){message}.*{LINE}"):
        bp.set_pipeline_stage_assignment(net, assignment)
    assert bp.record(net, X).plan.num_stages == 1


IN_FORWARD = {
    "too short": (_changed(lambda e: e.pop()), r"'head' call 0: only in the forward"),
    "too long": (
        _changed(lambda e: e.append(bp.Assignment("head", 1, 0))),
        r"'head' call 1: only in the plan",
    ),
    "order": (
        _changed(lambda e: e.reverse()),
        r"'head' call 0 in the plan, but 'stem' call 0 in the forward at its place",
    ),
    "glueless container": (
        _changed(lambda e: setattr(e[1], "stage", 1)),
        r"nothing runs on stage 1, which 'body' call 0 begins: .*entry.assign",
    ),
    "order of stages": ({"body": 2, "head": 1}, r"stage 2 begins .* before stage 1 has run"),
    "stage 0 left out": ({"stem": 1}, r"stage 1 begins .* before stage 0 has run"),
}


@pytest.mark.parametrize("what", IN_FORWARD)
@pytest.mark.parametrize("sample", [True, False])
def test_an_assignment_that_no_forward_follows_is_refused(what, sample):
    """With a sample at once; else at the first recording, with the line that set it."""
    net = net_of()
    assignment, message = IN_FORWARD[what]
    if sample:
        with pytest.raises(PlanError, match=f"(?s){message}.*{LINE}"):
            bp.set_pipeline_stage_assignment(net, assignment, X)
        assert bp.record(net, X).plan.num_stages == 1
        return
    bp.set_pipeline_stage_assignment(net, assignment)
    for use in (lambda: bp.record(net, X), lambda: bp.Pipeline(net, chunks=2)(X)):
        with pytest.raises(PlanError, match=f"(?s){message}.*set at .*{LINE}"):
            use()


def test_all_that_is_wrong_is_said_at_once():
    """Three calls, three complaints."""
    entries = _changed(lambda e: None)
    entries[0].stage, entries[1].stage, entries[2].stage = None, -1, True
    with pytest.raises(PlanError, match=LINE) as caught:
        bp.set_pipeline_stage_assignment(net_of(), entries)
    assert re.findall(r"got (None|-1|True)\b", str(caught.value)) == ["None", "-1", "True"]


def test_a_module_that_is_never_called():
    """A ModuleList begins nothing: it is said at once."""
    net = Part([nn.Linear(4, 4), nn.Linear(4, 4)], False, False)
    with pytest.raises(PlanError, match=r"'steps' is a ModuleList, which is never called"):
        bp.set_pipeline_stage_assignment(net, {"steps": 1})


def test_what_is_no_model_is_refused():
    """Each function names what came."""
    for function_ in (
        bp.get_pipeline_stage_assignment,
        bp.reset_pipeline_stage_assignment,
        bp.print_pipeline_stage_assignment_summary,
        lambda what: bp.set_pipeline_stage_assignment(what, {}),
    ):
        with pytest.raises(UsageError, match=f"for model, got .*{LINE}"):
            function_("resnet50")


def test_a_plan_of_training_serves_evaluation():
    """What a mode leaves out is no mistake, unless the stages are checked in that mode."""

    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.aux = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            return self.b(x) + self.aux(x) if self.training else self.b(x)

    net = Aux()
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[1].assign(1)
    entries[2].assign(1)
    bp.set_pipeline_stage_assignment(net, entries, X)
    net.eval()
    assert bp.record(net, X).plan.layout == "b=1"
    with pytest.raises(PlanError, match=r"'aux' call 0: only in the plan"):
        bp.set_pipeline_stage_assignment(net, entries, X)
    few = bp.get_pipeline_stage_assignment(net, X)
    bp.set_pipeline_stage_assignment(net.train(), few)
    with pytest.raises(PlanError, match=r"'aux' call 0: only in the forward.*list only where"):
        bp.record(net, X)
