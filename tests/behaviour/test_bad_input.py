"""Wrong use is a clear error at once, and leaves the model as it was: rule 8."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import (
    DeviceError,
    MarkError,
    MicrobatchError,
    PlanError,
    ScheduleError,
    UsageError,
)

from .bad_input import CPUS, HERE, marked_net, pipeline, plain_net, train, unchanged, x

# --- marks


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "a"])
@pytest.mark.parametrize(
    "mark",
    [
        bp.Block,
        bp.BlockFunction,
        lambda stage: bp.BeginBlock(nn.Linear(1, 1), stage),
        lambda stage: bp.BeginBlock(len, stage),
        lambda stage: bp.begin_blocks(plain_net(), {"1": stage}),
    ],
)
def test_a_stage_that_is_no_whole_number_is_refused(mark: Callable[[Any], Any], wrong: Any) -> None:
    """A stage that is no whole number from 0 on is a MarkError with the value and the line."""
    with pytest.raises(
        MarkError, match=rf"a non-negative integer or None for stage, got {wrong!r} .*{HERE}"
    ):
        mark(wrong)


def test_a_wrong_stage_in_a_pattern_marks_nothing() -> None:
    """begin_blocks with one wrong stage of several marks nothing."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(MarkError, match="got 'a'"):
            bp.begin_blocks(net, {"1": 1, "2": "a"})  # type: ignore[dict-item]


def test_an_unmatched_pattern_names_near_misses() -> None:
    """A pattern that matches nothing is a MarkError with near misses, and nothing is marked."""
    net = nn.ModuleDict({"layer1": nn.Linear(4, 4), "layer2": nn.Linear(4, 4)})
    with unchanged(net):
        with pytest.raises(MarkError, match=rf"got 'layr2' .*{HERE}.*; did you mean 'layer2'"):
            bp.begin_blocks(net, {"layer1": 1, "layr2": 2})


def test_an_unmatched_pattern_without_near_miss_names_paths() -> None:
    """Where nothing is near, the message says which paths there are."""
    with pytest.raises(MarkError, match=r"the path of a module.* got 'zzzz' .*; known: '0', '1'"):
        bp.begin_blocks(plain_net(), {"zzzz": 1})


@pytest.mark.parametrize("patterns", [{3: 1}, ["1"], "1"])
def test_patterns_of_a_wrong_kind_are_refused(patterns: Any) -> None:
    """begin_blocks takes a mapping from path patterns; anything else is a MarkError."""
    with pytest.raises(MarkError, match=rf"path pattern.*{HERE}"):
        bp.begin_blocks(plain_net(), patterns)


def test_begin_blocks_of_no_module_is_refused() -> None:
    """begin_blocks on something that is no module is a MarkError."""
    with pytest.raises(MarkError, match="an nn.Module for model, got 'net'"):
        bp.begin_blocks("net", {"1": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("thing", "shown"), [(3, "3"), ("layer", "'layer'"), (None, "None"), (torch.ones(1), "Tensor")]
)
def test_a_mark_on_what_cannot_be_called_is_refused(thing: Any, shown: str) -> None:
    """BeginBlock of an object that is not callable is a MarkError that shows it and the line."""
    with pytest.raises(MarkError, match=rf"got {shown} .*{HERE}"):
        bp.BeginBlock(thing, stage=1)


def test_block_as_decorator_of_a_module_names_begin_block() -> None:
    """Block as a decorator takes functions; for a module the message names BeginBlock."""
    with pytest.raises(MarkError, match=rf"got Linear .*{HERE}.*; mark a module with BeginBlock"):
        bp.Block(1)(nn.Linear(1, 1))


def test_a_second_mark_names_both_lines() -> None:
    """Marking a module twice is a MarkError with both stages and both lines."""
    layer = bp.BeginBlock(nn.Linear(4, 4), stage=1)
    with unchanged(layer):
        with pytest.raises(MarkError, match=rf"stage 1 already \(.*{HERE}\).*stage 2 \(.*{HERE}\)"):
            bp.BeginBlock(layer, stage=2)


def test_a_second_mark_of_a_callable_is_refused() -> None:
    """Marking a callable twice is a MarkError, as for a module."""
    marked = bp.BeginBlock(lambda value: value, stage=1)
    with pytest.raises(MarkError, match=r"stage 1 already.*stage 2"):
        bp.BeginBlock(marked, stage=2)


def test_a_second_mark_by_patterns_marks_nothing() -> None:
    """Two patterns that name one module are a MarkError, and nothing is marked."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(MarkError, match=rf"'2' is marked as stage 1 already.*stage 2.*{HERE}"):
            bp.begin_blocks(net, {"[12]": 1, "2": 2})


# --- stages and devices


def test_a_gap_in_the_stages_is_named() -> None:
    """A gap in the stage numbers is a PlanError that names the gap and the lines of the marks."""
    net = bp.begin_blocks(plain_net(), {"2": 2})
    with unchanged(net):
        with pytest.raises(PlanError, match=rf"got \[0, 2\], where \[1\] are missing.*{HERE}"):
            train(pipeline(net))


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    """Fewer devices than stages is a PlanError with both numbers and the lines of the marks."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(PlanError, match=rf"3 stages.*2 devices.*pass 3.*{HERE}"):
            train(pipeline(net, devices=["cpu"] * 2))


@pytest.mark.parametrize("device", ["cuda:77", "nope", None, torch.device("cuda", 77)])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    """A device that does not exist is a DeviceError when the pipeline is made."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(DeviceError, match=rf"device .*{device!s}"):
            pipeline(net, devices=["cpu", device, "cpu"])


def test_meta_as_a_device_is_refused() -> None:
    """The meta device holds no values: a stage on it is a DeviceError, and nothing moves."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(
            DeviceError, match="expected a device that computes for a stage, got 'meta'"
        ):
            train(pipeline(net, devices=["meta"] * 3))


@pytest.mark.parametrize("devices", ["cpu", 0, [], torch.device("cpu")])
def test_devices_that_are_no_list_are_refused(devices: Any) -> None:
    """Devices come as a list with one for each stage, or as their number; else a PlanError."""
    with pytest.raises(
        PlanError,
        match=r"expected (a list with one device for each stage|at least one device) for devices, got",
    ):
        pipeline(devices=devices)


# --- options


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"schedule": "zigzag"}, ScheduleError, "'1f1b'.*for schedule, got 'zigzag'"),
        ({"schedule": ["1f1b"]}, ScheduleError, "for schedule, got"),
        ({"chunks": 0}, PlanError, "a positive integer for chunks, got 0"),
        ({"chunks": -2}, PlanError, "a positive integer for chunks, got -2"),
        ({"chunks": 2.0}, PlanError, "for chunks, got 2.0"),
        ({"chunks": True}, PlanError, "for chunks, got True"),
        ({"checkpoint": "often"}, UsageError, "for checkpoint, got 'often'"),
        ({"loss_reduction": "avg"}, UsageError, "for loss_reduction, got 'avg'"),
        ({"isolate": True, "schedule": "uncut"}, UsageError, "isolate=True.*'sequential'"),
        ({"plan": "stage 1"}, PlanError, "a StagePlan for plan, got 'stage 1'"),
        ({"plan": {"1": 1}}, PlanError, r"a StagePlan for plan, got \{"),
        ({"batch_dims": "a"}, MicrobatchError, "batch_dims.*'a'"),
        ({"batch_dims": 1.5}, MicrobatchError, r"batch_dims.*1\.5"),
        ({"batch_dims": {0: "a"}}, MicrobatchError, "batch_dims.*'a'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """A wrong option is an error when the pipeline is made, with what was expected and came."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(error, match=said):
            pipeline(net, **options)


@pytest.mark.parametrize("model", ["net", nn.Linear, lambda value: value, None])
def test_a_model_that_is_no_module_is_refused(model: Any) -> None:
    """Pipeline takes a module; anything else is a UsageError with its type."""
    with pytest.raises(
        UsageError, match=r"expected an nn\.Module for model of Pipeline, got \S+ \(.*\.py"
    ):
        bp.Pipeline(model, devices=CPUS)


def test_a_submodule_that_is_a_weak_proxy_of_its_parent_is_refused() -> None:
    """torch registers it, and no walk over modules and parameters with duplicates would end."""
    net = marked_net()
    child = next(net.children())
    child.parent = weakref.proxy(net)
    with pytest.raises(UsageError, match=r"'.*parent', a weak proxy of .*keep a weak reference"):
        bp.Pipeline(net, devices=CPUS)


def test_a_pipeline_of_a_pipeline_is_refused() -> None:
    """A pipeline as the model of a pipeline is a UsageError."""
    with pytest.raises(UsageError, match=r"Pipeline already; pass its \.module"):
        bp.Pipeline(pipeline())


# --- plans


def test_a_plan_with_unknown_paths_names_them() -> None:
    """A plan for modules that the model does not have is a PlanError that names them."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(PlanError, match=r"\['nope'\].*Sequential does not have"):
            pipeline(net, plan=bp.StagePlan([bp.Assignment("nope", 0, 0)]))(x())


def test_a_plan_with_a_call_that_does_not_happen_is_refused() -> None:
    """A plan for the eighth call of a module that is called once is a PlanError."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0), bp.Assignment("1", 7, 1)])
    with pytest.raises(PlanError, match=r"'1'.*call 7"):
        pipeline(plain_net(), plan=plan)(x())


def test_a_plan_with_gaps_is_refused() -> None:
    """A plan whose stages leave a gap is a PlanError when the pipeline is made."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0), bp.Assignment("1", 0, 2)])
    with pytest.raises(PlanError, match=r"\[1\] are missing"):
        pipeline(plain_net(), plan=plan)


def test_an_empty_plan_trains_as_no_plan() -> None:
    """An empty plan overrides no mark: the marked model trains as without a plan."""
    net, other = marked_net(), marked_net()
    train(pipeline(net, plan=bp.StagePlan()))
    train(pipeline(other))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "a"])
def test_a_wrong_stage_in_a_plan_is_refused(wrong: Any) -> None:
    """A plan takes whole numbers from 0 on."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0)])
    with pytest.raises(
        PlanError, match=f"an integer from 0 to 1,048,575 for the stage of '0', got {wrong!r}"
    ):
        plan.assign("0", wrong)


def test_a_plan_pattern_that_matches_nothing_names_near_misses() -> None:
    """assign() with an unknown path is a PlanError with near misses."""
    plan = bp.StagePlan([bp.Assignment("layer1", 0, 0)])
    with pytest.raises(PlanError, match="got 'layr1' .*; did you mean 'layer1'"):
        plan.assign("layr1", 1)


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"assignments": [{"path": "a"}]}'])
def test_a_plan_from_text_that_is_none_shows_the_format(text: str) -> None:
    """from_json of something else is a PlanError that shows the format."""
    with pytest.raises(PlanError, match=r'expected a plan {"version": 2'):
        bp.StagePlan.from_json(text)
