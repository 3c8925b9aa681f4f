"""Stages as data: get, set, reset; layouts and JSON; the table that Keras users know."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.compat import keras
from blockpipe.errors import BlockpipeError, PlanError, UsageError
from blockpipe.testing import dry_run

from ...parity import any_loss, plain_step
from ...stage_devices import examples


class Part(nn.Module):
    """Calls its children in a row, with operations of its own before and after."""

    def __init__(self, children: list[nn.Module], before: bool, after: bool) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.steps = nn.ModuleList(children)

    def forward(self, x):
        if self.before:
            x = x * 1.5
        for step in self.steps:
            x = step(x)
        return x + 0.5 if self.after else x


class Marked(nn.Module):
    """A block inside of a forward, and a function that is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        with bp.Block(1):
            x = self.b(x).tanh()
        return function(x)


@bp.BlockFunction(stage=0)
def function(x):
    return torch.nn.functional.gelu(x) * 1.25


# A tree: a number names a leaf (a few are shared, so that they are called several times).
trees = st.recursive(
    st.integers(0, 7),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=4), st.booleans(), st.booleans()),
    max_leaves=5,
)


def build(tree: object) -> nn.Module:
    torch.manual_seed(1)
    shared = {0: nn.Linear(4, 4), 1: nn.Tanh(), 2: nn.Identity(), 3: nn.Linear(4, 4)}

    def made(node: object) -> nn.Module:
        if isinstance(node, int):
            new = {4: nn.Linear, 5: nn.LayerNorm}.get(node)
            if new is not None:
                return new(4, 4) if new is nn.Linear else new(4)
            return Marked() if node > 5 else shared[node]
        children, before, after = node
        return Part([made(child) for child in children], before, after)

    return Part([made(tree), nn.Linear(4, 4)], False, True)


def staged(net: nn.Module, data: st.DataObject) -> bp.StagePlan:
    """A plan of random stages, reached in order; returns to earlier ones are drawn too."""
    plan = bp.record(net, torch.zeros(2, 4)).plan
    highest = 0
    for entry in plan.assignments:
        if data.draw(st.booleans()):
            entry.stage = data.draw(st.integers(0, highest + 1))
            highest = max(highest, entry.stage)
    route = bp.record(net, torch.zeros(2, 4), plan=plan).route
    numbers = {s: i for i, s in enumerate(dict.fromkeys(route))}
    for entry in plan.assignments:
        entry.stage = numbers.get(entry.stage, 0)
    return plan


several = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow], deadline=None
)


@several
@given(trees, st.data())
def test_a_layout_survives_a_recording(tree, data):
    """What is read from a recording's layout makes the same recording: returns, repeated calls and
    containers too."""
    net = build(tree)
    recording = bp.record(net, torch.zeros(2, 4), plan=staged(net, data))
    layout = recording.plan.layout
    again = bp.record(net, torch.zeros(2, 4), plan=bp.StagePlan.from_layout(layout))
    assert again.plan == recording.plan
    assert again.route == recording.route
    assert bp.StagePlan.from_layout(layout).layout == layout


@several
@given(trees, st.data())
def test_replay_follows_a_plan_to_the_bit(tree, data):
    """Whole, partial and by layout: outputs and gradients are those of the plain loop."""
    net = build(tree)
    twin = copy.deepcopy(net)
    plan = staged(net, data)
    form = data.draw(st.sampled_from(["plan", "layout", "some"]))
    if form == "layout":
        layout = bp.record(net, torch.zeros(2, 4), plan=plan).plan.layout
        plan = bp.StagePlan.from_layout(layout)
    elif form == "some":
        kept = [a for a in plan.assignments if data.draw(st.booleans())]
        plan = bp.StagePlan([bp.Assignment(a.path, a.call, a.stage) for a in kept], partial=True)
    recording = bp.record(net, torch.zeros(2, 4), plan=plan)
    try:
        recording.check()
    except PlanError:
        return  # leaving entries out left a gap
    isolate = data.draw(st.booleans())
    devices = ["cpu"] * recording.num_stages
    pipe = bp.Pipeline(net, devices=devices, chunks=3, plan=plan, isolate=isolate)
    x = torch.randn(6, 4)
    loss = pipe.forward_backward(x, loss_fn=any_loss).loss
    expected = plain_step(twin, (x,), {}, None, any_loss, 3)
    assert torch.equal(loss, expected)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    assert pipe.plan == recording.plan


@several
@given(trees, st.data())
def test_json_keeps_stages_kinds_and_nesting(tree, data):
    """Text brings back what was written, entry inside of entry."""
    plan = staged(build(tree), data)
    again = bp.StagePlan.from_json(plan.to_json())
    assert again == plan
    assert [(e.kind, len(e.inside)) for e in again.assignments] == [
        (e.kind, len(e.inside)) for e in plan.assignments
    ]


paths = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6)
items = st.tuples(paths, st.none() | st.integers(0, 12), st.integers(0, 3))


@given(st.lists(items, max_size=5))
def test_a_layout_holds_any_path(entries):
    """Commas, signs, quotes and spaces in a module's name survive."""
    plan = bp.StagePlan([bp.Assignment(*e) for e in entries], partial=True)
    if not plan.problems():
        assert bp.StagePlan.from_layout(plan.layout) == plan


def net_of() -> nn.Module:
    """Named layers, one a container; unmarked."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("stem", nn.Linear(4, 4))
    net.add_module("body", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    net.add_module("head", nn.Linear(4, 2))
    return net


X = torch.ones(6, 4)


def test_entries_are_nested_and_the_plan_has_them_in_a_row():
    """Both are the same objects; assign moves a call with all inside."""
    entries = bp.get_pipeline_stage_assignment(net_of(), X)
    assert [e.path for e in entries] == ["stem", "body", "head"]
    assert [(e.path, e.kind) for e in entries[1].inside] == [
        ("body.0", "Linear"),
        ("body.1", "ReLU"),
        ("body.2", "Linear"),
    ]
    plan = bp.StagePlan(entries)
    assert plan.assignments[2] is entries[1].inside[0]
    assert plan.nested == entries
    entries[1].assign(1)
    assert [a.stage for a in plan.assignments] == [0, 1, 1, 1, 1, 0]
    assert plan.layout == "body=1, head=0"


def test_calls_of_functions_have_no_entry():
    """Only modules are assigned; what they call goes along."""
    entries = bp.get_pipeline_stage_assignment(Marked(), X)
    assert [(e.path, e.stage) for e in entries] == [("a", 0), ("b", 1)]


def test_a_module_called_twice_has_two_entries():
    """Each call has its own stage."""
    linear = nn.Linear(4, 4)
    net = nn.Sequential(linear, nn.ReLU(), linear)
    entries = bp.get_pipeline_stage_assignment(net, X)
    assert [(e.path, e.call) for e in entries] == [("0", 0), ("1", 0), ("0", 1)]
    entries[2].assign(1)
    assert bp.set_pipeline_stage_assignment(net, entries, X).layout == "0#1=1"
    assert bp.record(net, X).route == [0, 1]
    # The path that it is registered under first, or another.
    bp.set_pipeline_stage_assignment(net, {"1": 1, "2": 0}, X)
    assert bp.record(net, X).plan.layout == "1=1, 0#1=0"


def test_a_containers_stage_is_that_of_its_own_code():
    """Its entry's stage holds until the first call inside."""
    net = Part([Part([nn.Linear(4, 4), nn.Linear(4, 4)], True, True)], False, False)
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[0].inside[0].stage = entries[0].inside[1].stage = 1
    plan = bp.set_pipeline_stage_assignment(net, entries, X)
    assert plan.layout == "steps.0.steps.0=1"
    recording = bp.record(net, X)
    assert recording.route == [0, 1]
    # The multiplication before the first layer; the layers, and the addition after them.
    assert [hop.operations for hop in recording.hops] == [1, 3]
    entries[0].assign(0)
    entries[0].inside[1].stage = 1
    bp.set_pipeline_stage_assignment(net, entries, X)
    assert [hop.operations for hop in bp.record(net, X).hops] == [2, 2]


@pytest.mark.parametrize("form", ["nested", "flat", "plan", "dict", "layout", "path", "file"])
def test_every_form_sets_the_same_stages(form, tmp_path):
    """A list, a plan, a mapping, a layout and a file."""
    net = net_of()
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[1].assign(1)
    entries[2].assign(2)
    plan = bp.StagePlan(entries)
    plan.save(tmp_path / "plan.json")
    given = {
        "nested": entries,
        "flat": plan.assignments,
        "plan": plan,
        "dict": {"b?dy": 1, "head": 2},
        "layout": plan.layout,
        "path": tmp_path / "plan.json",
        "file": str(tmp_path / "plan.json"),
    }[form]
    bp.set_pipeline_stage_assignment(net, given)
    assert bp.record(net, X).plan == plan
    assert bp.get_pipeline_stage_assignment(net, X) == entries


def test_what_is_set_overrides_marks_until_it_is_reset():
    """In recordings, pipelines and dry runs; an explicit plan wins over it."""
    net = bp.begin_blocks(net_of(), {"stem": 0, "body.2": 1})
    marks = bp.record(net, X).plan
    bp.set_pipeline_stage_assignment(net, "body=1, head=2", X)
    assert bp.record(net, X).route == [0, 1, 2]
    assert dry_run(net, X).route == [0, 1, 2]
    assert bp.Pipeline(net, devices=["cpu"] * 3, chunks=2, sample=(X,)).plan.num_stages == 3
    assert bp.record(net, X, plan=marks).plan == marks
    bp.reset_pipeline_stage_assignment(net)
    assert bp.record(net, X).plan == marks
    bp.reset_pipeline_stage_assignment(net)  # nothing is there: nothing happens


class WithLoss(nn.Module):
    """A model inside of another one."""

    def __init__(self, model: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.model, self.calls = model, calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.model(x)
        return x.square().mean()


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("form", ["entries", "mapping"])
def test_what_is_set_counts_inside_of_another_model(form):
    """Until stages are set on that one."""
    net, x = chain(), torch.zeros(2, 4)
    entries = bp.get_pipeline_stage_assignment(net, x)
    entries[1].assign(1)
    entries[2].assign(2)
    bp.set_pipeline_stage_assignment(net, entries if form == "entries" else {"1": 1, "2": 2}, x)
    outer = nn.Sequential(nn.Tanh(), WithLoss(net))
    assert bp.record(outer, x).plan.layout == "1.model.1=1, 1.model.2=2"
    assert dry_run(outer, x).route == [0, 1, 2]
    assert bp.record(copy.deepcopy(outer), x).route == [0, 1, 2]
    assert bp.record(outer, x, plan=bp.StagePlan([])).route == [0]
    bp.set_pipeline_stage_assignment(outer, {"1": 1}, x)
    assert bp.record(outer, x).route == [0, 1]
    bp.reset_pipeline_stage_assignment(outer)
    bp.reset_pipeline_stage_assignment(net)
    assert bp.record(outer, x).route == [0]


def test_beginnings_count_at_each_call_of_an_inner_model():
    """A plan of where stages begin counts at each call; one of all calls does not fit."""
    net, x = chain(), torch.zeros(2, 4)
    bp.set_pipeline_stage_assignment(net, {"0": 0, "2": 1}, x)
    assert bp.record(WithLoss(net, calls=2), x).route == [0, 1, 0, 1]
    bp.set_pipeline_stage_assignment(net, bp.get_pipeline_stage_assignment(net, x), x)
    with pytest.raises(PlanError, match=r"'model.0' call 1: only in the forward.*\(set at .*py:"):
        bp.record(WithLoss(net, calls=2), x)


def test_a_module_that_two_models_have_goes_by_its_first_path():
    """It goes by the first of its paths, as everywhere."""
    net, x = chain(), torch.zeros(2, 4)
    entries = bp.get_pipeline_stage_assignment(net, x)
    entries[1].stage = entries[2].stage = 1
    bp.set_pipeline_stage_assignment(net, entries, x)
    outer = nn.Sequential()
    outer.tied = net[1]
    outer.model = net
    outer.forward = lambda x: net(x)
    assert bp.record(outer, x).plan.layout == "tied=1"


def test_stages_inside_are_refused_where_they_are_ambiguous():
    """Set on two models, or beside marks."""
    a, b, x = chain(), chain(), torch.zeros(2, 4)
    for net in (a, b):
        bp.set_pipeline_stage_assignment(net, {"1": 1}, x)
    line = r"\(\S*test_assignment.py:\d+\)"
    remedy = r"reset_pipeline_stage_assignment\(model.get_submodule\('{}'\)\)"
    both = nn.Sequential(a, b)
    with pytest.raises(PlanError, match=f"on '0' {line} and on '1' {line}.*{remedy.format(1)}"):
        bp.record(both, x)
    assert bp.record(both, x, plan=bp.StagePlan([])).route == [0]
    beside = nn.Sequential(a, bp.BeginBlock(nn.Tanh(), stage=2))
    with pytest.raises(
        PlanError, match=f"on '0' {line}.*marks outside.*{line}.*{remedy.format(0)}"
    ):
        bp.record(beside, x)
    assert bp.balance(beside, x, 2, "flops").num_stages == 2
    bp.BeginBlock(b[2], stage=2)  # inside: overridden
    assert bp.record(nn.Sequential(b), x).route == [0, 1]


def test_entries_changed_after_setting_do_not_count():
    """What is set is a copy, and so is what comes back."""
    net = net_of()
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[2].assign(1)
    plan = bp.set_pipeline_stage_assignment(net, entries)
    entries[1].assign(1)
    plan.assign("stem", 1)
    assert bp.record(net, X).plan.layout == "head=1"


def test_copies_have_the_stages_and_the_state_dict_does_not():
    """Copies have the plan, each its own; the state dict does not."""
    net = net_of()
    keys = list(net.state_dict())
    bp.set_pipeline_stage_assignment(net, {"head": 1})
    assert list(net.state_dict()) == keys
    saved = io.BytesIO()
    torch.save(net, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(saved, weights_only=False),
    ]
    bp.reset_pipeline_stage_assignment(net)
    for other in copies:
        assert bp.record(other, X).plan.layout == "head=1"
    pipe = bp.Pipeline(copies[0], devices=["cpu"] * 2, chunks=2, sample=(X,))
    assert copy.deepcopy(pipe).module is not copies[0]
    twin = copy.deepcopy(pipe)
    bp.reset_pipeline_stage_assignment(pipe)
    twin(X)
    assert twin.plan.layout == "head=1"


def test_a_file_fits_the_model_built_again(tmp_path):
    """Stages saved with one instance are set on another, which trains as the plain loop does."""
    net = net_of()
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[1].inside[2].assign(1)
    entries[2].assign(2)
    bp.StagePlan(entries).save(tmp_path / "plan.json")
    other, twin = net_of(), net_of()
    bp.set_pipeline_stage_assignment(other, tmp_path / "plan.json", X)
    pipe = bp.Pipeline(other, devices=["cpu"] * 3, chunks=3, isolate=True)
    loss = pipe.forward_backward(X, loss_fn=any_loss).loss
    assert torch.equal(loss, plain_step(twin, (X,), {}, None, any_loss, 3))
    assert pipe.recording.route == [0, 1, 2]


# --- pipelines notice


def test_a_pipeline_notices_at_its_next_call():
    """What is set on it is set on its model, which is placed anew; parameters stay the same."""
    net = net_of()
    parameters = list(net.parameters())
    pipe = bp.Pipeline(net, chunks=2)
    pipe(X)
    assert pipe.recording.route == [0]
    bp.set_pipeline_stage_assignment(pipe, {"body": 1, "head": 2})
    assert pipe.recording is None
    assert pipe.plan.layout == "body=1, head=2"
    twin = net_of()
    loss = pipe.forward_backward(X, loss_fn=any_loss).loss
    assert torch.equal(loss, plain_step(twin, (X,), {}, None, any_loss, 2))
    assert pipe.recording.route == [0, 1, 2]
    assert len(pipe.devices) == 3
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    bp.reset_pipeline_stage_assignment(net)
    assert len(pipe.summary(X).stages) == 1
    pipe(X)
    assert pipe.recording.route == [0]


def test_a_pipeline_notices_stages_set_inside_of_its_model():
    net, x = chain(), torch.randn(4, 4)
    twin = copy.deepcopy(net)
    pipe = bp.Pipeline(nn.Sequential(net), chunks=2)
    pipe(x)
    assert pipe.recording.route == [0]
    bp.set_pipeline_stage_assignment(net, {"1": 1})
    assert pipe.recording is None
    assert pipe.plan.layout == "0.1=1"
    loss = pipe.forward_backward(x, loss_fn=any_loss).loss
    assert torch.equal(loss, plain_step(nn.Sequential(twin), (x,), {}, None, any_loss, 2))
    assert pipe.recording.route == [0, 1]
    assert len(pipe.devices) == 2
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_stages_are_read_from_a_pipeline_and_a_recording():
    """A pipeline that was called needs no sample."""
    pipe = bp.Pipeline(bp.begin_blocks(net_of(), {"head": 1}), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(UsageError, match=r"needs a sample before the first call.*test_assignment"):
        bp.get_pipeline_stage_assignment(pipe)
    before = bp.get_pipeline_stage_assignment(pipe, X)
    pipe(X)
    assert bp.get_pipeline_stage_assignment(pipe) == before
    assert bp.get_pipeline_stage_assignment(pipe.recording) == before


def test_setting_stages_beside_a_plan_is_refused():
    """What is set on it would be overridden: it says so."""
    net = net_of()
    pipe = bp.Pipeline(net, chunks=2, plan=bp.record(net, X).plan)
    with pytest.raises(UsageError, match=r"was given a plan=.*make it without"):
        bp.set_pipeline_stage_assignment(pipe, {"head": 1})


def test_stages_and_devices_of_a_pipeline_are_compared_at_once():
    """Too few devices are found when the stages are set."""
    pipe = bp.Pipeline(net_of(), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(PlanError, match=r"3 stages \(0..2\), but there are 2 devices"):
        bp.set_pipeline_stage_assignment(pipe, {"body": 1, "head": 2})


def test_too_few_devices_name_the_calls_and_the_line_that_set_them():
    """Once the forward is recorded, or while it is; of a plan that is passed the calls alone."""
    net = net_of()
    bp.set_pipeline_stage_assignment(net, {"body.1": 1, "head": 2})
    calls = r"2 devices .*stage 1 at 'body.1' call 0, stage 2 at 'head' call 0"
    with pytest.raises(PlanError, match=rf"{calls}, set at \S*test_assignment.py:\d+\)$"):
        bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)(X)
    with pytest.raises(PlanError, match=r"\('head' call 0, set at \S*test_assignment.py:\d+\)$"):
        bp.record(net, X, devices=[torch.device("cpu")] * 2)
    plan = bp.record(net, X).plan
    bp.reset_pipeline_stage_assignment(net)
    with pytest.raises(PlanError, match=rf"{calls}\)$"):
        bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, plan=plan)(X)


def test_other_methods_follow_a_plan_at_each_call_of_the_model():
    """run() counts calls from 0 at each forward."""
    seen = []

    class Looping(nn.Sequential):
        def forward(self, x):
            x = super().forward(x)
            seen.append(bp.current_stage())
            return x

        def loop(self, x):
            return self(self(x))

    net = Looping(nn.Linear(4, 4), nn.Linear(4, 4))
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[1].assign(1)
    bp.set_pipeline_stage_assignment(net, entries, X)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, sample=(X,))
    seen.clear()
    assert torch.equal(pipe.run(net.loop, X), net.loop(X))
    assert seen[:2] == [1, 1]


def test_a_call_in_a_sealed_module_counts():
    """A module is called inside of a sealed one and outside: the second call is the second."""
    shared = nn.Linear(4, 4)
    net = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Linear(4, 4), shared)
    entries = bp.get_pipeline_stage_assignment(net, X)
    entries[2].assign(1)
    twin = copy.deepcopy(net)
    bp.set_pipeline_stage_assignment(net, entries, X)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, isolate=True)
    loss = pipe.forward_backward(X, loss_fn=any_loss).loss
    assert pipe.recording.route == [0, 1]
    assert torch.equal(loss, plain_step(twin, (X,), {}, None, any_loss, 2))
    assert torch.equal(shared.weight.grad, twin[2].weight.grad)


def test_a_module_that_does_nothing_makes_no_hop():
    """A mark on an Identity is followed by no operation: its door must not go there."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(net)
    pipe = bp.Pipeline(
        bp.begin_blocks(net, {"1": 2, "2": 1, "3": 2}), devices=["cpu"] * 3, chunks=2
    )
    loss = pipe.forward_backward(X, loss_fn=any_loss).loss
    assert pipe.recording.route == [0, 1, 2]
    assert torch.equal(loss, plain_step(twin, (X,), {}, None, any_loss, 2))


def test_no_doors_inside_of_what_runs_untouched():
    """A whole plan names modules inside of sealed ones too; a compiled one must not see doors."""
    inner = nn.Linear(4, 4)
    net = nn.Sequential(nn.Sequential(inner, nn.ReLU()), nn.Linear(4, 4))
    plan = bp.record(net, X).plan
    plan.assign("1", 1)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, plan=plan, sample=(X,))
    (prepared,) = pipe._preparer.known.values()
    with prepared.sealed_forwards:
        assert "forward" in vars(net[0])
        assert "forward" not in vars(inner)


# --- what is refused

LINE = r"test_assignment\.py:\d+"


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
    "None for an entry": (_changed(lambda e: e.insert(0, None)), r"entry 0 is None, no Assignment"),
    "no entry": ([1, "stem"], r"entry 0 is 1, no Assig.*entry 1 is 'stem'"),
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
    "no path": ({1: 1}, r"entry 0 is .* no Assignment with a path"),
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


# --- the table


def printed(*args, **kwargs) -> list[str]:
    lines: list[str] = []
    bp.print_pipeline_stage_assignment_summary(*args, print_fn=lines.append, **kwargs)
    return lines


class Joined(nn.Module):
    """A layer with several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

    def forward(self, x):
        return self.join(self.left(x), self.right(x))


def test_the_table_is_that_of_keras():
    """To the character, with the line length that IPU Keras' own test uses."""
    net = bp.begin_blocks(Joined(), {"join": 1})
    assert printed(net, 85, args=X) == [
        'Model: "Joined"',
        "_" * 85,
        "Layer (type) (node index)         Input Layers                      Pipeline Stage   ",
        "=" * 85,
        "left (Linear) (0)                                                   0                ",
        "_" * 85,
        "right (Linear) (0)                                                  0                ",
        "_" * 85,
        "join (Bilinear) (0)               left                              1                ",
        "                                  right                                              ",
        "=" * 85,
    ]
    assert {len(line) for line in printed(net, args=X)[1:]} == {89}


def test_every_call_has_its_row():
    """In execution order; containers of several stages have all of them."""
    net = net_of()
    bp.set_pipeline_stage_assignment(net, "body.2=1, head=1")
    recording = bp.record(net, X)
    rows = [line for line in printed(recording)[4:] if line[0] not in "_="]
    assert [row.split()[0] for row in rows] == [a.path for a in recording.plan.assignments]
    assert [row[71:].strip() for row in rows] == ["0", "0, 1", "0", "0", "1", "1"]
    assert [row[35:71].strip() for row in rows] == ["", "stem", "stem", "body.0", "body.1", "body"]


@given(st.integers(30, 200))
def test_long_names_go_on_in_the_next_line(length):
    """Nothing is cut off, and no line is longer than the rule."""
    path = "encoder_with_a_long_name"
    net = nn.Sequential()
    net.add_module(path, nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4)))
    lines = printed(net, length, args=X)
    assert all(len(line) == length for line in lines[1:])
    for column, begin, end in ((0, 0, 0.4), (1, 0.4, 0.8)):
        cells = "".join(
            line[int(length * begin) : int(length * end)].strip()
            for line in lines[4:]
            if len(set(line)) > 1
        )
        expected = (f"{path}.0.0(Linear)(0)", f"{path}.0")[column]
        assert expected in cells.replace(" ", "")


@pytest.mark.parametrize("length", [0, 29, -1, True, "89", 40.0])
def test_a_line_length_below_the_least_is_refused(length):
    """The least is named."""
    with pytest.raises(UsageError, match="an integer from 30 up for line_length"):
        printed(net_of(), length, args=X)


def test_a_print_fn_that_is_no_function_is_refused():
    with pytest.raises(UsageError, match="a function of a line for print_fn, got 5"):
        bp.print_pipeline_stage_assignment_summary(net_of(), None, 5, args=X)


def test_the_table_goes_to_print(capsys):
    """By default, and with print_fn=None as in Keras."""
    bp.print_pipeline_stage_assignment_summary(net_of(), None, None, args=X)
    first = capsys.readouterr().out
    bp.print_pipeline_stage_assignment_summary(net_of(), args=X)
    assert capsys.readouterr().out == first != ""


# --- models that people use


@pytest.mark.slow
def test_a_torchvision_model_set_and_trained():
    """ResNet with stages set inside of residual blocks: the plain loop's gradients."""
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(num_classes=4)
    twin = copy.deepcopy(net)
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    loss_fn = nn.functional.cross_entropy
    entries = bp.get_pipeline_stage_assignment(net, x)
    by_path = {e.path: e for e in bp.StagePlan(entries).assignments}
    for path, stage in {"layer2.0.conv2": 1, "layer2.0.bn2": 1, "layer3": 1}.items():
        by_path[path].assign(stage)
    for path in ("layer2.0.downsample", "layer2.0", "layer2.1"):
        if path != "layer2.0":
            by_path[path].assign(1)
    for path in ("layer4", "avgpool", "fc"):
        by_path[path].assign(2)
    # Between conv2 and the rest of layer2.0 the second relu's call follows on stage 1.
    second = [e for e in by_path["layer2.0"].inside if e.path == "layer2.0.relu"][1]
    second.assign(1)
    plan = bp.set_pipeline_stage_assignment(net, entries, x)
    assert plan.layout == "layer2.0.conv2=1, layer4=2"
    pipe = bp.Pipeline(net, devices=["cpu"] * 3, chunks=2, isolate=True)
    loss = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    assert torch.equal(loss, plain_step(twin, (x,), {}, y, loss_fn, 2))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(BlockpipeError, match=r"does not have"):
        bp.set_pipeline_stage_assignment(torchvision.models.alexnet(), plan)


def test_stages_set_since_the_last_call_are_not_shown_as_the_old_ones():
    """What is asked without a sample would be of before: it needs one."""
    pipe = bp.Pipeline(bp.begin_blocks(net_of(), {"head": 1}), devices=["cpu"] * 3, chunks=2)
    pipe(X)
    bp.set_pipeline_stage_assignment(pipe, {"body": 1, "head": 2})
    for ask in (
        pipe.summary,
        lambda: pipe.explain("head"),
        lambda: bp.get_pipeline_stage_assignment(pipe),
    ):
        with pytest.raises(UsageError, match=r"needs a sample.*test_assignment"):
            ask()
    assert pipe.summary(X).prediction is not None
    assert bp.StagePlan(bp.get_pipeline_stage_assignment(pipe, X)).layout == "body=1, head=2"


def test_a_balanced_plan_has_classes_and_what_is_inside():
    plan = bp.balance(net_of(), X, 2, by="parameters")
    recorded = bp.record(net_of(), X, plan=plan).plan
    assert plan.nested == recorded.nested
    assert [a.kind for a in plan.assignments] == [a.kind for a in recorded.assignments]
    assert [len(a.inside) for a in plan.assignments] == [
        len(a.inside) for a in recorded.assignments
    ]


# --- what IPU Keras' own tests pin


class Twice(nn.Module):
    """The model of Keras' tests: three layers, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.dense_1, self.dense_2 = nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, one, two):
        one, two = self.flatten(one), self.flatten(two)
        return self.dense_2(self.dense_1(one)), self.dense_2(self.dense_1(two))


PAIR = (torch.ones(2, 4), torch.ones(2, 4))


def test_each_call_of_a_layer_has_an_entry():
    """By the layer's path and the number of the call; all are on stage 0 at first."""
    entries = keras.get_pipeline_stage_assignment(Twice(), PAIR)
    assert [(e.path, e.call) for e in entries] == [
        ("flatten", 0),
        ("flatten", 1),
        ("dense_1", 0),
        ("dense_2", 0),
        ("dense_1", 1),
        ("dense_2", 1),
    ]
    assert {e.pipeline_stage for e in entries} == {0}


def test_stages_that_are_set_are_got_and_reset():
    """By the attribute that Keras' entries have; a nested entry takes those inside along."""
    net = Twice()
    entries = keras.get_pipeline_stage_assignment(net, PAIR)
    for stage, entry in enumerate(entries):
        entry.pipeline_stage = stage
    keras.set_pipeline_stage_assignment(net, entries)
    found = keras.get_pipeline_stage_assignment(net, PAIR)
    assert [e.pipeline_stage for e in found] == [0, 1, 2, 3, 4, 5]
    keras.reset_pipeline_stage_assignment(net)
    found = keras.get_pipeline_stage_assignment(net, PAIR)
    assert [e.pipeline_stage for e in found] == [0] * 6
    nested = keras.get_pipeline_stage_assignment(net_of(), X)[1]
    nested.pipeline_stage = 1
    assert [e.pipeline_stage for e in nested.inside] == [1, 1, 1]


def _popped(entries):
    del entries[-1]


def _no_entry(entries):
    entries[0] = None


def _unassigned(entries):
    entries[0].stage = None


def _swapped(entries):
    entries[:2] = reversed(entries[:2])


def _every_second(entries):
    for stage, entry in enumerate(entries):
        entry.pipeline_stage = 2 * stage


def _too_early(entries):
    for stage, entry in enumerate(entries[1:]):
        entry.pipeline_stage = stage
    entries[0].pipeline_stage = 4


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_popped, "'dense_2' call 1: only in the forward"),
        (_no_entry, "entry 0 is None, but should be an Assignment"),
        (_unassigned, "for the stage of 'flatten' call 0, got None"),
        (_swapped, "'flatten' call 1 in the plan, but 'flatten' call 0 in the forward"),
        (_every_second, r"without gaps, got \[0, 2, 4, 6, 8, 10\], where \[1, 3, 5, 7, 9\] are"),
        (_too_early, "'flatten' call 0 is on stage 4, before any call on stage 0"),
    ],
)
def test_what_keras_refuses_is_refused(change, message):
    """A wrong number, class or order of entries; an entry without a stage; gaps; a stage too
    early. Each is a ValueError, as there."""
    net = Twice()
    entries = keras.get_pipeline_stage_assignment(net, PAIR)
    change(entries)
    with pytest.raises(ValueError, match=message):
        keras.set_pipeline_stage_assignment(
            net, entries, *([PAIR] if change in (_popped, _swapped) else [])
        )


def test_a_sequence_takes_a_list_of_numbers():
    """One for each child, a module that is there twice has two; changes, errors."""
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert (
        keras.set_pipeline_stage_assignment(net, [0, 0, 1, 2]).layout
        == "0#0=0, 1#0=0, 0#1=1, 3#0=2"
    )
    entries = keras.get_pipeline_stage_assignment(net, X)
    assert [e.pipeline_stage for e in entries] == [0, 0, 1, 2]
    assert [e.pipeline_stage for e in entries[3].inside] == [2, 2]
    net.append(nn.Linear(4, 2))  # stays where the forward is
    assert [e.stage for e in keras.get_pipeline_stage_assignment(net, X)] == [0, 0, 1, 2, 2]
    keras.set_pipeline_stage_assignment(net, [0, 0, 1, 2, 3])
    net.pop(4)
    with pytest.raises(PlanError, match="'4'"):
        bp.record(net, X)
    for wrong, message in (
        ([0, 1], "a stage for each of its 4 children, got '2 stages'"),
        ([0.0, 0.0, 1.0, 1.0], "entry 0 is 0.0"),
        ([1, 1, 2, 2], "'0' call 0 is on stage 1, before any call on stage 0"),
    ):
        with pytest.raises(PlanError, match=message):
            keras.set_pipeline_stage_assignment(net, wrong)
    with pytest.raises(PlanError, match="is for the children of an nn.Sequential"):
        keras.set_pipeline_stage_assignment(Twice(), [0, 0, 1])


def test_a_model_without_a_sample_says_what_is_missing():
    """Keras' own call, which knows the inputs of a built model."""
    for ask in (
        keras.get_pipeline_stage_assignment,
        keras.print_pipeline_stage_assignment_summary,
    ):
        with pytest.raises(RuntimeError, match=r"its forward takes \(one, two\): pass a sample"):
            ask(Twice())


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("layer", "model.get_submodule(entry.path)"),
        ("node_index", "entry.call"),
        ("is_nested_model", "bool(entry.inside)"),
        ("pipeline_stage_assignments", "entry.inside"),
        ("inbound_layers", "call.inbound"),
    ],
)
def test_other_attributes_of_keras_entries_are_understood(name, ours):
    """The error has the name here; one that is set is an error too."""
    entry = keras.get_pipeline_stage_assignment(net_of(), X)[0]
    with pytest.raises(AttributeError, match=re.escape(ours)):
        getattr(entry, name)
    with pytest.raises(AttributeError, match="pipelinestage"):
        entry.pipelinestage = 1
    assert copy.deepcopy(entry) == pickle.loads(pickle.dumps(entry)) == entry


def test_names_that_the_door_lacks_say_what_to_use():
    for name, instead in keras.MISSING.items():
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(keras, name)
