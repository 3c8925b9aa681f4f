"""Stages as data: get, set, reset; layouts and JSON; the table that Keras users know."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.errors import PlanError
from blockpipe.testing import dry_run

from ...parity import any_loss, plain_step
from ...stage_devices import examples
from .assigned_models import Part, chain, net_of


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
