"""Pipelines notice an assignment of stages; models that people use are assigned."""

import copy

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import BlockpipeError, PlanError, UsageError

from ..compat.keras.assigned_models import chain, net_of
from ..parity import any_loss, plain_step

X = torch.ones(6, 4)


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
    with pytest.raises(
        UsageError, match=r"needs a sample before the first call.*test_assigned_pipelines"
    ):
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
    with pytest.raises(PlanError, match=rf"{calls}, set at \S*test_assigned_pipelines.py:\d+\)$"):
        bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)(X)
    with pytest.raises(
        PlanError, match=r"\('head' call 0, set at \S*test_assigned_pipelines.py:\d+\)$"
    ):
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


# --- models that people use


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
        with pytest.raises(UsageError, match=r"needs a sample.*test_assigned_pipelines"):
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
