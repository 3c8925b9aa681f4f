"""The result of a search as a plan that says what its stages cost, and what limits them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from math import inf

from ..stages.marks import mark_of
from ..stages.plan import StagePlan
from .balanced_plan import UNITS, BalancedPlan, StageShare
from .cut_points import beginners
from .plan_as_code import marks_text
from .search import CutSearch


def balanced_plan(search: CutSearch, plan: StagePlan, bounds: list[int]) -> BalancedPlan:
    """Return a plan with its costs.

    Args:
        search: the search that found it.
        plan: the plan, recorded: with the calls inside of each, and their classes.
        bounds: the segments that its stages begin with, and the end.
    """
    conditions, recording = search.conditions, search.recording
    seconds, played = search.costs.step(bounds)
    shares = list(_shares(search, bounds))
    marks = (mark_of(module) for module in search.model.modules())
    on_modules = {mark.where for mark in marks if mark is not None}
    return BalancedPlan(
        plan.nested,
        model=recording.model,
        shares=shares,
        by=conditions.by,
        source=search.source,
        bottleneck=_bottleneck(search, shares, bounds),
        step_seconds=seconds,
        microbatches=conditions.chunks,
        simulation=played,
        notes=[*search.notes, *_notes(search, in_one_thread=played is None)],
        marks_text=marks_text(
            search.model,
            recording.calls,
            [beginners(recording, begin) for begin in bounds[1:-1]],
            search.stages(bounds),
            [where for where in recording.marks if where not in on_modules],
        ),
    )


def _shares(search: CutSearch, bounds: list[int]) -> Iterator[StageShare]:
    costs, conditions = search.costs.costs, search.conditions
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        call = beginners(search.recording, begin)[0] if begin else None
        limit, speed = conditions.limits[stage], conditions.speeds[stage]
        yield StageShare(
            stage=stage,
            begins="the start" if call is None else call.path,
            call=0 if call is None else call.call,
            segments=1 + sum(search.closed[index] is None for index in range(begin + 1, end)),
            cost=float(search.costs.cost(stage)[begin, end]),
            forward=float(costs.forward[begin:end].sum()) / speed,
            backward=float(costs.backward[begin:end].sum()) / speed,
            elements=round(float(costs.elements[begin:end].sum())),
            parameters=round(float(costs.parameters[begin:end].sum())),
            memory=round(float(search.costs.memory(stage)[begin, end])),
            received=round(float(costs.received[begin, end])),
            limit=None if limit == inf else round(limit),
        )


def _notes(search: CutSearch, *, in_one_thread: bool) -> Iterator[str]:
    conditions = search.conditions
    if conditions.stages > 1 and in_one_thread:
        yield "operations are small: steps run in one thread, as the plain loop does"
    lanes, cores = len(set(conditions.lanes)), os.cpu_count() or 1
    if not conditions.is_asynchronous and not in_one_thread and lanes > cores:
        yield f"{lanes} CPU stages share {cores} cores: a step takes longer than predicted"
    for info in search.recording.parameters:
        if len(info.names) > 1:
            yield f"tied: {' = '.join(info.names)} lives on the first stage that reads it"


def _bottleneck(search: CutSearch, shares: list[StageShare], bounds: list[int]) -> str:
    """Say what keeps the costliest stage from being cheaper."""
    show = UNITS[search.conditions.by]
    worst = max(shares, key=lambda share: share.cost)
    mean = sum(share.cost for share in shares) / len(shares)
    text = f"the costliest stage: {worst.stage}, {show(worst.cost)}"
    if len(shares) > 1 and mean:
        text += f", {100 * (worst.cost / mean - 1):.1f} % over the mean"
    if worst.segments == 1:
        begin, end = bounds[worst.stage], bounds[worst.stage + 1]
        return f"{text}; it cannot be split{search.why_closed(begin, end)}"
    return "; ".join([text, *_moves(search, worst.stage, bounds)])


def _moves(search: CutSearch, stage: int, bounds: list[int]) -> Iterator[str]:
    """Say what it would cost to move an end of a stage to a neighbour."""
    show = UNITS[search.conditions.by]
    begin, end = bounds[stage], bounds[stage + 1]
    cuts = [index for index in range(begin + 1, end) if search.closed[index] is None]
    for beside, cut in ((stage - 1, cuts[0]), (stage + 1, cuts[-1])):
        if not 0 <= beside < len(bounds) - 1:
            continue
        if beside < stage:
            moved, here, there = begin, (cut, end), (bounds[beside], cut)
        else:
            moved, here, there = cut, (begin, cut), (cut, bounds[beside + 1])
        yield (
            f"with {search.name(moved)} on stage {beside}, stages {stage} and {beside} would cost "
            f"{show(float(search.costs.cost(stage)[here]))} and "
            f"{show(float(search.costs.cost(beside)[there]))}"
        )
