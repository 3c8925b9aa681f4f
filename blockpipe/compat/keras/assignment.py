"""Stages as data on a model: get, change, set and reset them, by the names of IPU Keras.

They are a list with one entry for each module call, in execution order. The list is kept on the
model and not passed to a pipeline, so everything that records the model follows it, without a
change to the marks in its code or to the places where it is used.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected, is_integer, mismatch
from ..._torch.modules import children_of
from ...errors import PlanError, UsageError
from ...pipeline import Pipeline
from ...recording.plan_resolution import AttachedPlan, Planned, attach_plan, resolve
from ...recording.record import record, record_planned
from ...recording.recording import Recording
from ...recording.sample import RecordRequest, fits, taken_by
from ...stages.assignment import Assignment
from ...stages.marks import has_forward
from ...stages.plan import StagePlan
from ...stages.plan_text import read_layout


@remembers_caller
def get_pipeline_stage_assignment(
    model: nn.Module | Recording, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> list[Assignment]:
    """Return the stage of each module call, in execution order.

    The entries are yours: a change to them takes effect once they are passed to
    :func:`set_pipeline_stage_assignment`.

    Args:
        model: a model, a :class:`Pipeline` (which needs no sample once it was called), or a
            recording.
        args: the forward's positional arguments; a single tensor needs no tuple. Only their shapes
            count.
        kwargs: the forward's keyword arguments.

    Returns:
        An :class:`Assignment` for each call of an outermost submodule; the calls that it makes are
        in its ``inside``. ``StagePlan(entries).assignments`` has all of them in one list. Calls of
        functions under :func:`BlockFunction` have no entry: they run on the forward's stage.

    Raises:
        UsageError: there is no sample of a model whose forward takes arguments, or of a pipeline
            that is not recorded yet.

    Source: IPU Keras' ``Model.get_pipeline_stage_assignment``.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> bp.get_pipeline_stage_assignment(net, torch.zeros(1, 4))[1]
        Assignment(path='1', call=0, stage=0, kind='Linear')
    """
    call = "get_pipeline_stage_assignment({}, x)"
    return recording_of(model, args, kwargs, call).plan.nested


@remembers_caller
def set_pipeline_stage_assignment(
    model: nn.Module,
    assignment: Sequence[Assignment]
    | Sequence[int]
    | StagePlan
    | Mapping[str, int]
    | str
    | os.PathLike[str],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
) -> StagePlan:
    """Set the stages of a model, instead of its marks.

    The stages are kept on the model. :func:`record`, :class:`Pipeline` and everything else that
    records it follow them, unless they have a ``plan=`` of their own; so does a model that contains
    it, unless stages are set on that one. Copies and pickles of the model have them too; the
    ``state_dict`` does not change. A pipeline of the model notices at its next call, and places the
    model anew.

    Args:
        model: the model; for a :class:`Pipeline`, its model.
        assignment: the entries from :func:`get_pipeline_stage_assignment`, nested or in one list; a
            :class:`StagePlan`; the places where stages begin, as in :func:`begin_blocks`: a mapping
            from path patterns (``{"layer3": 1}``) or a layout (``"layer3=1, layer4=2"``); the name
            of a JSON file, which ends in ``.json``, or its path; or, for an ``nn.Sequential``, a
            list with the stage of each child (one that is appended later stays on the last stage).
        args: a sample, with which everything is checked at once. Without it, the checks that depend
            on the forward are made when it is recorded first.
        kwargs: the sample's keyword arguments.

    Returns:
        A copy of the plan that was set.

    Raises:
        PlanError: the assignment does not fit: an entry has no stage, or an impossible one; there
            are gaps; a stage begins before the one below it has run; calls are missing, in another
            order or of another class, or the forward does not make them. The error names all of
            these, and nothing has changed. (A return to an earlier stage is fine.)
        UsageError: the model is not a module, or is a pipeline with a ``plan=``.

    Source: IPU Keras' ``Model.set_pipeline_stage_assignment``, which cannot return to a stage.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> entries = bp.get_pipeline_stage_assignment(net, torch.zeros(1, 4))
        >>> entries[1].assign(1)
        >>> bp.set_pipeline_stage_assignment(net, entries).layout
        '1=1'
        >>> bp.record(net, torch.zeros(1, 4)).route
        [0, 1]
    """
    where = users_line()
    module = _model_of(model)
    has_sample = bool(kwargs) or not isinstance(args, tuple | list) or len(args) > 0
    if _are_numbers(assignment):
        plan, problems = _of_children(module, assignment)
    else:
        plan, problems = _as_plan(assignment, where)
    if not problems:
        given = model._preparer.given_devices if isinstance(model, Pipeline) else None
        devices = None if given is None else len(given)
        problems = [*plan.problems(devices), *_misfits(module, plan)]
    if not problems and not has_sample:
        problems += _too_early(plan)
    if problems:
        more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise PlanError(
            f"the assignment does not fit {type(module).__name__}: {'; '.join(problems[:12])}{more}"
            f" ({where}); change one that get_pipeline_stage_assignment(model, args) returns"
        )
    planned = Planned(module, plan, where, every_module=True)
    if has_sample:
        args = args if isinstance(args, tuple | list) else (args,)
        record_planned(RecordRequest(module, tuple(args), dict(kwargs or {}), planned))
    attach_plan(module, AttachedPlan(copy.deepcopy(plan), where))
    return copy.deepcopy(plan)


def reset_pipeline_stage_assignment(model: nn.Module) -> None:
    """Undo :func:`set_pipeline_stage_assignment`, so that the marks count again.

    Args:
        model: a model, or a pipeline of it.

    Source: IPU Keras' ``Model.reset_pipeline_stage_assignment``.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> _ = bp.set_pipeline_stage_assignment(net, {"1": 1})
        >>> bp.reset_pipeline_stage_assignment(net)
        >>> bp.record(net, torch.zeros(1, 4)).route
        [0]
    """
    attach_plan(_model_of(model), None)


def recording_of(
    what: nn.Module | Recording, args: Any, kwargs: Mapping[str, Any] | None, call: str
) -> Recording:
    """Return the recording of a model with a sample, of a pipeline, or a recording itself.

    Args:
        what: one of these.
        args: the sample's positional arguments, or its only one.
        kwargs: its keyword arguments.
        call: the call as a user writes it, with a place for the model, for errors.
    """
    if isinstance(what, Recording):
        return what
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    kwargs = dict(kwargs or {})
    if isinstance(what, Pipeline):
        return what.recorded(args, kwargs, call=call.format("pipe"))
    if isinstance(what, nn.Module):
        if not args and not kwargs and not fits(what, args, kwargs):
            raise UsageError(
                f"{call.partition('(')[0]}() needs a sample, in the place of the input shape by "
                f"which Keras builds a model: the forward of {type(what).__name__} takes "
                f"{taken_by(what)} ({users_line()}); write {call.format('model')}"
            )
        return record(what, args, kwargs)
    raise UsageError(expected("an nn.Module, a Pipeline or a Recording", what, for_="model"))


def _model_of(model: nn.Module) -> nn.Module:
    if isinstance(model, Pipeline):
        if model._preparer.given_plan is not None:
            raise UsageError(
                "this pipeline was given a plan=, which overrides stages that are set on its model "
                f"({users_line()}); make it without, or make another with the new plan"
            )
        return model.module
    if not isinstance(model, nn.Module):
        raise UsageError(expected("an nn.Module or a Pipeline", model, for_="model"))
    return model


def _as_plan(given: object, where: str) -> tuple[StagePlan, list[str]]:
    """Return an argument as a plan, and the problems of its entries."""
    try:
        if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
            return StagePlan.load(given), []
        if isinstance(given, str):
            return StagePlan([Assignment(*i) for i in read_layout(given)], partial=True), []
    except PlanError as error:
        raise PlanError(f"{error} ({where})") from error
    if isinstance(given, StagePlan):
        return given, _wrong_entries(given.assignments)
    if isinstance(given, Mapping):
        entries = [Assignment(path, None, stage) for path, stage in given.items()]
        return StagePlan(entries, partial=True), _wrong_entries(entries)
    if isinstance(given, list | tuple):
        problems = _wrong_entries(given)
        return StagePlan([] if problems else list(given)), problems
    contract = "a list of Assignment entries, a StagePlan, a mapping, a layout or a JSON file"
    raise PlanError(expected(contract, given, for_="assignment"))


def _are_numbers(given: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(given, list | tuple):
        return False
    return len(given) > 0 and all(is_integer(stage, 0) for stage in given)


def _of_children(model: nn.Module, stages: Sequence[int]) -> tuple[StagePlan, list[str]]:
    """Return the plan of a sequence's children, and the problem of a list that does not fit."""
    if not isinstance(model, nn.Sequential):
        return StagePlan(), ["a list of numbers is for the children of an nn.Sequential"]
    children = children_of(model)
    if len(stages) != len(children):
        return StagePlan(), [
            mismatch(f"a stage for each of its {len(children)} children", f"{len(stages)} stages")
        ]
    paths: dict[int, str] = {}
    calls = Counter[str]()
    entries = []
    for (name, child), stage in zip(children.items(), stages, strict=True):
        path = paths.setdefault(id(child), name)
        entries.append(Assignment(path, calls[path], stage, type(child).__name__))
        calls[path] += 1
    return StagePlan(entries, partial=True), [*_too_early(StagePlan(entries))]


def _wrong_entries(entries: Sequence[Any]) -> list[str]:
    return [
        f"entry {i} is {entry!r}, but should be an Assignment with a path and the number of a call"
        for i, entry in enumerate(entries)
        if not _is_entry(entry)
    ]


def _is_entry(value: object) -> bool:
    if not isinstance(value, Assignment):
        return False
    has_call = value.call is None or is_integer(value.call, 0)
    return has_call and isinstance(value.path, str) and isinstance(value.inside, list)


def _misfits(model: nn.Module, plan: StagePlan) -> Iterator[str]:
    """Iterate over the problems of a plan that the model's modules show without a forward."""
    try:
        Planned(model, plan)
    except PlanError as error:
        yield str(error)
        return
    modules = dict(model.named_modules())
    named = dict(resolve(model, plan))
    for entry in plan.assignments:
        found = [modules[path] for path in named[id(entry)]]
        if not any(has_forward(module) for module in found):
            yield (
                f"{entry.name} is a {type(found[0]).__name__}, which is never called, so no stage "
                "can begin with it; name the modules inside"
            )
        elif entry.kind and entry.kind != type(found[0]).__name__:
            yield f"{entry.name} is a {type(found[0]).__name__}, but in the plan a {entry.kind}"


def _too_early(plan: StagePlan) -> Iterator[str]:
    """Iterate over stages that begin before the one below: at calls without calls inside."""
    highest = -1
    for entry in () if plan.is_partial else plan.assignments:
        if not entry.inside:
            if entry.stage > highest + 1:
                yield (
                    f"{entry.name} is on stage {entry.stage}, before any call on stage "
                    f"{highest + 1}: stages are numbered as they are reached first"
                )
            highest = max(highest, entry.stage)
