"""Stages as data on a model: get them, change them, set them, take them off.

A list that Keras users know: one entry for each module call, in execution order. It is kept on the
model and not given to a pipeline, so that whatever records the model follows it: the marks in its
code need not be touched, nor every place where it is used.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .._common.callsite import remembers_caller, users_line
from ..errors import PlanError, UsageError
from ..pipeline import Pipeline
from ..recording.plan_resolution import AttachedPlan, Planned, attach_plan, resolve
from ..recording.record import record, record_planned
from ..recording.recording import Recording
from ..stages.plan import Assignment, StagePlan
from ..stages.plan_text import read_layout


@remembers_caller
def get_pipeline_stage_assignment(
    model: nn.Module | Recording, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> list[Assignment]:
    """The stage of each module call, in execution order.

    The entries are yours: what you change in them counts once they are given to
    :func:`set_pipeline_stage_assignment`.

    Args:
        model: a model, a :class:`Pipeline` (which needs no sample once it was called), or a
            recording.
        args: the forward's positional arguments; a single tensor may come bare. Only their shapes
            count.
        kwargs: its keyword arguments.

    Returns:
        One :class:`Assignment` for each call of an outermost submodule; the calls it makes are in
        its ``inside``. ``StagePlan(entries).assignments`` has all of them in a row. Calls of
        functions under :func:`BlockFunction` have no entry: they are where the forward is.

    Raises:
        UsageError: a pipeline that is not recorded yet, and no sample.

    Source: IPU Keras' ``Model.get_pipeline_stage_assignment``.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> bp.get_pipeline_stage_assignment(net, torch.zeros(1, 4))[1]
        Assignment(path='1', call=0, stage=0, kind='Linear')
    """
    return recording_of(model, args, kwargs).plan.nested


@remembers_caller
def set_pipeline_stage_assignment(
    model: nn.Module,
    assignment: Sequence[Assignment] | StagePlan | Mapping[str, int] | str | os.PathLike[str],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
) -> StagePlan:
    """Set the stages of a model, in the place of its marks.

    What is set is kept on the model: :func:`record`, :class:`Pipeline` and all else follow it,
    unless they are given a ``plan=`` of their own; of a model that contains it too, unless stages
    are set on that one. Copies and pickles of the model have it too;
    the ``state_dict`` is what it was. A pipeline of the model notices at its next call, and places
    the model anew.

    Args:
        model: whose stages; for a :class:`Pipeline`, those of its model.
        assignment: the entries that :func:`get_pipeline_stage_assignment` gave, or all of them in
            a row; a :class:`StagePlan`; or only where stages begin, as
            :func:`begin_blocks` has it: a mapping from path patterns (``{"layer3": 1}``), a layout
            (``"layer3=1, layer4=2"``); or the name of a JSON file, which ends in ``.json``, or its
            path.
        args: a sample; with it everything is checked at once. Without it, what depends on the
            forward is checked when it is recorded first.
        kwargs: its keyword arguments.

    Returns:
        The plan that was set: a copy.

    Raises:
        PlanError: all that is wrong with it: no stage, or none that can be; gaps; a stage that
            begins before the one below it has run; calls that are missing, in another order or of
            another class, or that the forward does not make. Then nothing has changed. (Returning
            to an earlier stage is fine.)
        UsageError: no model, or a pipeline that was given a ``plan=``.

    Source: IPU Keras' ``Model.set_pipeline_stage_assignment``, where no stage can be returned to.

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
            f" ({where}); get_pipeline_stage_assignment(model, args) gives one that does, to be "
            "changed"
        )
    planned = Planned(module, plan, where, every_module=True)
    if has_sample:
        record_planned(module, args, kwargs, planned)
    attach_plan(module, AttachedPlan(copy.deepcopy(plan), where))
    return copy.deepcopy(plan)


def reset_pipeline_stage_assignment(model: nn.Module) -> None:
    """Take off what :func:`set_pipeline_stage_assignment` set: the marks count again.

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
    what: nn.Module | Recording, args: Any, kwargs: Mapping[str, Any] | None
) -> Recording:
    """The recording that is meant by a model with a sample, a pipeline, or a recording."""
    if isinstance(what, Recording):
        return what
    if isinstance(what, Pipeline):
        bare = not isinstance(args, tuple | list)
        return what.recorded((args,) if bare else tuple(args), dict(kwargs or {}))
    if isinstance(what, nn.Module):
        return record(what, args, kwargs)
    raise UsageError(
        f"stages are those of an nn.Module, a Pipeline or a Recording, but {type(what).__name__} "
        f"came ({users_line()})"
    )


def _model_of(model: nn.Module) -> nn.Module:
    if isinstance(model, Pipeline):
        if model._preparer.given_plan is not None:
            raise UsageError(
                "this pipeline was given a plan=, which overrides what is set on its model; make "
                f"it without, or make another with the new plan ({users_line()})"
            )
        return model.module
    if not isinstance(model, nn.Module):
        raise UsageError(
            "stages are set on an nn.Module or a Pipeline, but "
            f"{type(model).__name__} came ({users_line()})"
        )
    return model


def _as_plan(given: object, where: str) -> tuple[StagePlan, list[str]]:
    """What was given as a plan, and what is wrong with its parts."""
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
    raise PlanError(
        "an assignment is a list of Assignment entries, a StagePlan, a mapping from paths to "
        f"stages, a layout or a JSON file, but {type(given).__name__} came ({where})"
    )


def _wrong_entries(entries: Sequence[Any]) -> list[str]:
    return [
        f"entry {i} is {entry!r}, no Assignment with a path and the number of a call"
        for i, entry in enumerate(entries)
        if not isinstance(entry, Assignment)
        or not isinstance(entry.path, str)
        or not (entry.call is None or (type(entry.call) is int and entry.call >= 0))
        or not isinstance(entry.inside, list)
    ]


def _misfits(model: nn.Module, plan: StagePlan) -> Iterator[str]:
    """What is wrong with a plan as the model's modules alone tell."""
    try:
        Planned(model, plan)
    except PlanError as error:
        yield str(error)
        return
    modules = dict(model.named_modules())
    named = dict(resolve(model, plan))
    for entry in plan.assignments:
        found = [modules[path] for path in named[id(entry)]]
        if all(_is_never_called(module) for module in found):
            yield (
                f"{entry.name} is a {type(found[0]).__name__}, which is never called, so that no "
                "stage can begin with it; name what is in it"
            )
        elif entry.kind and entry.kind != type(found[0]).__name__:
            yield f"{entry.name} is a {type(found[0]).__name__}, but in the plan a {entry.kind}"


def _is_never_called(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def _too_early(plan: StagePlan) -> Iterator[str]:
    """Stages that begin before the one below: of calls that hold no other, in the plan's order."""
    highest = -1
    for entry in () if plan.is_partial else plan.assignments:
        if not entry.inside:
            if entry.stage > highest + 1:
                yield (
                    f"{entry.name} is on stage {entry.stage}, before any call on stage "
                    f"{highest + 1}: stages are numbered as they are reached first"
                )
            highest = max(highest, entry.stage)
