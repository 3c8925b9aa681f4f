"""Where to cut a model into stages: found from its recording, for any model that can be recorded.

The forward is recorded as one stage. It can be cut where a module call begins a segment, and stages
are the stretches between cuts. What such a stretch costs is known for all of them, so the
best choice is found by a dynamic program, exactly. A heuristic would be no shorter, and others
that balance a list of layers (torchgpipe, DeepSpeed) need the model to be one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._common.callsite import remembers_caller, users_line
from .._common.text import bytes_text
from ..costs.probing import copy_line
from ..costs.rates import Rates, straight
from ..devices.devices import checked_devices, is_asynchronous, is_on_meta
from ..errors import BlockpipeError, PlanError, UsageError
from ..preparation.hop_costs import rates_of_stages
from ..preparation.memory_model import copies_of
from ..preparation.options import check_loss
from ..preparation.prepared import lanes_of
from ..recording.record import record
from ..recording.recording import Recording
from ..schedules.builders import ScheduleOption
from ..stages.marks import mark_of, matching_paths
from ..stages.plan import Assignment, StagePlan
from ..weights.module_interface import ModuleInterface
from .balanced_plan import UNITS, BalancedPlan, StageShare
from .cut_points import SegmentCosts, beginners, best_bounds, cut_depth_penalty, why_closed
from .partition import check_count, checked_number, checked_numbers
from .plan_as_code import marks_text
from .segment_timing import SegmentTimes, measured
from .stage_costs import Conditions, StageCosts


@remembers_caller
def balance(
    model: nn.Module,
    args: Any = (),
    stages: int = 2,
    by: str = "time",
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    chunks: int = 8,
    schedule: ScheduleOption = "1f1b",
    devices: Sequence[Any] | None = None,
    speeds: Sequence[float] | None = None,
    limits: Sequence[int] | int | None = None,
    optimizer: object = None,
    first: float = 0.0,
    last: float = 0.0,
    slack: float = 0.05,
    at: str | Sequence[str] | None = None,
    bandwidth: float | None = None,
    measure: bool = True,
    repeats: int = 5,
    training: bool = True,
) -> BalancedPlan:
    """Cut a model into stages so that the costliest one costs as little as can be, to 5 %.

    Marks in the model do not count, and stay. It is left as it was. Of choices that are as good to
    ``slack`` it is the one that moves the fewest bytes between stages, and of these the one at the
    outermost modules: mostly at whole layers. What is found is recorded once more with its stages,
    so that a plan that is returned is one that a pipeline can carry out.

    Args:
        model: the user's; for ``by="time"`` with values, or times are estimated.
        args: positional arguments of *one micro-batch*; a single tensor may come bare.
        stages: how many.
        by: ``"time"`` of a micro-batch's forward and backward; ``"memory"``, the peak in bytes;
            ``"parameters"``, their bytes, those that are shared counted where they are read first;
            ``"flops"`` of a forward.
        kwargs: keyword arguments of one micro-batch.
        target: given to ``loss_fn``.
        loss_fn: run at the end of what is measured, as :meth:`Pipeline.forward_backward` does.
            ``None``: the model's own loss; if it returns none, the backward begins at its outputs.
        chunks: micro-batches of a step.
        schedule: of the steps: how many micro-batches are in flight, and the predicted time.
        devices: one for each stage; times are measured on the first. ``None``: where the model is,
            and on an accelerator one more for each further stage.
        speeds: of the stages' devices, relative to the one where times are measured (2: twice as
            fast). ``None``: all alike.
        limits: bytes that each stage may need at its peak: one number, or one for each stage.
        optimizer: what it keeps of each parameter, as for :meth:`Pipeline.memory`.
        first: what the first stage costs besides, in the unit of ``by`` (seconds, bytes, floating
            point operations).
        last: what the last stage costs besides.
        slack: by what share the costliest stage may cost more than it must, where fewer bytes cross
            then, or a stage begins with a larger module; 0: not at all, and what is found is the
            optimum, if that is in the middle of a layer.
        at: stages begin only with modules that these path patterns name (``"blocks.*"``), which are
            those of :func:`begin_blocks`; ``None``: with any.
        bandwidth: bytes a second between devices. ``None``: copies between the first two that
            differ are timed; where all are one, and on the CPU, a crossing costs nothing.
        measure: for ``by="time"``: run the micro-batch and time it; else, and on the meta device,
            times are estimated: the recording's work by rates that are measured on the device.
        repeats: how often it is run; medians count.
        training: with a backward; ``False``: a forward alone, under ``no_grad``.

    Memory is counted as :meth:`Pipeline.memory` does it, but for what ``checkpoint=`` and
    ``offload=`` save, and for the gradients that schedules with a backward in two parts keep.

    Returns:
        A :class:`BalancedPlan`. Printed, it is a table; its :meth:`~BalancedPlan.marks` are lines
        to paste.

    Raises:
        PlanError: more stages than the model can be cut into; limits that no choice keeps to (with
            the stage, and how much is missing); numbers that are none.
        UsageError: an unknown ``by``, an unknown optimizer; no gradient to go back from.
        MarkError: a pattern in ``at`` that names no module.
        RecordingError: the forward does not run on the arguments.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> plan = bp.balance(net, torch.zeros(4, 8), 3, by="parameters")
        >>> print(plan.marks())
        model[2] = bp.BeginBlock(model[2], stage=1)
        model[4] = bp.BeginBlock(model[4], stage=2)
        >>> bp.record(net, torch.zeros(4, 8), plan=plan).route
        [0, 1, 2]
    """
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if not isinstance(kwargs, Mapping | None):
        raise UsageError(f"kwargs is a mapping, but {kwargs!r} came ({users_line()})")
    kwargs = dict(kwargs or {})
    _check(model, by, loss_fn, target, speeds)
    check_count("repeats", repeats)
    places = _places(model, devices, check_count("stages", stages))
    is_far = is_asynchronous(places[0])
    if bandwidth is not None:
        link = straight(0.0, checked_numbers("bandwidth", [bandwidth], 1)[0])
    else:
        link = copy_line(places[0], next((p for p in places if p != places[0]), places[0]))
    to = Conditions(
        stages,
        by,
        check_count("chunks", chunks),
        schedule,
        places,
        lanes_of(places, devices or places),
        checked_numbers("speeds", [1.0] * stages if speeds is None else speeds, stages),
        _checked_limits(limits, stages),
        copies_of(optimizer),
        (checked_number("first", first), checked_number("last", last)),
        checked_number("slack", slack),
        link,
        training,
    )
    with torch.set_grad_enabled(training):
        recording = record(model, args, kwargs, plan=StagePlan([]), intended=places)
        found = _Search(model, args, kwargs, recording, to, _named_at(model, at))
        lanes = 1 if is_far or found.costing.one_thread else len(set(to.lanes))
        if by != "time" or not measure or is_on_meta(model):
            found.estimate(rates_of_stages(places, lanes)[0])
        else:
            found.use(
                measured(
                    model,
                    recording,
                    found.open,
                    args,
                    kwargs,
                    target=target,
                    loss_fn=loss_fn,
                    device=places[0],
                    threads=max(1, torch.get_num_threads() // lanes),
                    lanes=lanes,
                    repeats=repeats,
                    training=training,
                )
            )
        return found.plan()


class _Search:
    """The search for one model's cuts.

    Args:
        model: whose.
        args: of a micro-batch.
        kwargs: of a micro-batch.
        recording: in one stage.
        conditions: what the stages run under.
        at: the paths of the modules that stages may begin with; ``None``: any.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recording: Recording,
        conditions: Conditions,
        at: Container[str] | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.recording, self.to = recording, conditions
        self.closed = why_closed(recording)
        for index, why in enumerate(self.closed):
            begins = (call.path in at for call in beginners(recording, index)) if at else (True,)
            self.closed[index] = why or (None if any(begins) else "at= does not name it")
        nothing = [0.0] * len(recording.segments)  # is known of times yet
        self._cost_with(nothing, nothing)
        self.source = ""
        self.notes: list[str] = []

    def _cost_with(self, forward: Sequence[float], backward: Sequence[float]) -> None:
        rows = [torch.tensor(row, dtype=torch.double) for row in (forward, backward)]
        costs = SegmentCosts(self.recording, rows[0], rows[1], self.to.devices)
        self.costing = StageCosts(costs, self.to)

    def estimate(self, rates: Rates) -> None:
        """Take the recording's work for the times, by a device's rates."""
        segments = self.recording.segments
        self._cost_with(
            [rates.forward(segment.work) for segment in segments],
            [rates.backward(segment.work) for segment in segments],
        )
        self.source = "estimated" if self.to.by == "time" else "from the recording"
        self.notes.append(f"times are estimated by rates {rates.source}")

    def use(self, times: SegmentTimes) -> None:
        """Take measured times."""
        self._cost_with(times.forward, times.backward)
        threads = "" if self.to.is_asynchronous else f", {times.threads} thread(s)"
        crowd = f", {times.crowded:.2f} × for lanes beside it" if times.crowded > 1 else ""
        self.source = f"measured on {times.device}{threads}{crowd}"
        if times.stamped > 1.1 * times.step:
            self.notes.append(
                f"measured, a micro-batch took {times.stamped / times.step:.2f} × its time: small "
                "segments are not known well"
            )

    @property
    def open(self) -> list[int]:
        """The segments that a stage can begin with, but for the first."""
        return [index for index, why in enumerate(self.closed) if why is None]

    def plan(self) -> BalancedPlan:
        """The best plan that can be carried out."""
        while True:
            bounds = self._bounds()
            stages = self._stages(bounds)
            plan = StagePlan([Assignment(path, call, s) for (path, call), s in stages.items()])
            try:
                recording = self._tried(plan, list(range(self.to.stages)))
            except BlockpipeError as error:
                self._close(bounds, error)
                continue
            return self._report(plan, recording, bounds, stages)

    def _tried(self, plan: StagePlan, route: list[int]) -> Recording:
        """The model recorded with a plan.

        Raises:
            BlockpipeError: it cannot be carried out.
        """
        recording = record(self.model, self.args, self.kwargs, plan=plan, intended=self.to.devices)
        if recording.route != route:
            raise PlanError(f"the route is {recording.route}")
        if recording.shared_state:
            raise PlanError(f"{recording.shared_state[0].name} is torn apart")
        if recording.shared_changes:
            raise PlanError(f"several stages see the changes of {recording.shared_changes[0].what}")
        if recording.shared_generators:
            raise PlanError(f"a generator is shared ({recording.shared_generators[0].where})")
        return recording

    def _close(self, bounds: Sequence[int], error: BlockpipeError) -> None:
        """No plan has those cuts any more that cannot be made, even alone.

        Raises:
            BlockpipeError: the given one; each cut for itself could be made.
        """
        bad = {}
        for cut in bounds[1:-1]:
            stages = self._stages([0, cut, len(self.recording.segments)])
            plan = StagePlan([Assignment(path, call, s) for (path, call), s in stages.items()])
            try:
                self._tried(plan, [0, 1])
            except BlockpipeError as alone:
                bad[cut] = str(alone)
        if not bad:
            raise error
        for cut, why in bad.items():
            self.closed[cut] = why

    def _stages(self, bounds: Sequence[int]) -> dict[tuple[str, int], int]:
        """From each module call, in order, to its stage."""
        found = {}
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            for segment in self.recording.segments[begin:end]:
                for call in map(self.recording.calls.__getitem__, segment.calls):
                    if call.is_module:
                        found[call.path, call.call] = stage
        return found

    def _bounds(self) -> list[int]:
        """The segments that stages begin with, and the end."""
        at = torch.tensor([0, *self.open, len(self.recording.segments)])
        if len(at) - 1 < self.to.stages:
            raise PlanError(
                f"{self.recording.model} can be cut at {len(self.open)} places, so it has "
                f"{len(self.open) + 1} stages at most, but stages={self.to.stages} "
                f"({users_line()}){self._why_closed(0, len(self.recording.segments))}"
            )
        costs, excess = [], []
        for stage in range(self.to.stages):
            cost = self.costing.cost(stage)[at][:, at]
            if self.to.limits[stage] < inf:
                over = self.costing.memory(stage)[at][:, at] - self.to.limits[stage]
                cost = torch.where(over <= 0, cost, torch.inf)
                excess.append(over)
            else:
                excess.append(torch.full_like(cost, -torch.inf))
            costs.append(cost)
        # Of equal bytes the cut that one would write: bytes are whole, so that fractions do that.
        nicest = cut_depth_penalty(self.recording, at[:-1].tolist()) / self.to.stages
        crossing = (
            self.costing.costs.received[at][:, at] + nn.functional.pad(nicest, (0, 1))[:, None]
        )
        found = best_bounds(costs, crossing, slack=self.to.slack)
        if found is None:
            self._refuse(best_bounds(excess, crossing), excess, at)
        return [int(at[index]) for index in found or ()]

    def _refuse(self, bounds: list[int] | None, excess: list[Tensor], at: Tensor) -> NoReturn:
        """Say by how much the best that there is does not fit."""
        assert bounds is not None  # there are enough cuts
        over = [float(e[a, b]) for e, (a, b) in zip(excess, pairwise(bounds), strict=True)]
        stage = max(range(len(over)), key=over.__getitem__)
        limit = self.to.limits[stage]
        raise PlanError(
            f"no cut of {self.recording.model} into {self.to.stages} stages keeps to limits="
            f"{[bytes_text(round(n)) if n < inf else None for n in self.to.limits]}: at the best, "
            f"stage {stage} (from {self._name(int(at[bounds[stage]]))}) needs "
            f"{bytes_text(round(limit + over[stage]))}, {bytes_text(ceil(over[stage]))} more than "
            f"its {bytes_text(round(limit))} ({users_line()}); take more stages, smaller "
            "micro-batches, or an optimizer that keeps less"
        )

    # --- what is told of it

    def _report(
        self,
        plan: StagePlan,
        recording: Recording,
        bounds: list[int],
        stages: dict[tuple[str, int], int],
    ) -> BalancedPlan:
        costs, to = self.costing.costs, self.to
        seconds, played = self.costing.step(bounds)
        shares = []
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            call = beginners(self.recording, begin)[0] if begin else None
            limit = to.limits[stage]
            shares.append(
                StageShare(
                    stage,
                    call.path if call is not None else "the start",
                    call.call if call is not None else 0,
                    1 + sum(self.closed[index] is None for index in range(begin + 1, end)),
                    float(self.costing.cost(stage)[begin, end]),
                    float(costs.forward[begin:end].sum()) / to.speeds[stage],
                    float(costs.backward[begin:end].sum()) / to.speeds[stage],
                    round(float(costs.elements[begin:end].sum())),
                    round(float(costs.parameters[begin:end].sum())),
                    round(float(self.costing.memory(stage)[begin, end])),
                    round(float(costs.received[begin, end])),
                    None if limit == inf else round(limit),
                )
            )
        marked = {mark.where for m in self.model.modules() if (mark := mark_of(m)) is not None}
        return BalancedPlan(
            recording.plan.nested,  # with the calls inside of each, and their classes
            model=self.recording.model,
            shares=shares,
            by=to.by,
            source=self.source,
            bottleneck=self._bottleneck(shares, bounds),
            step_seconds=seconds,
            microbatches=to.chunks,
            simulation=played,
            notes=[*self.notes, *self._notes(played is None)],
            marks_text=marks_text(
                self.model,
                self.recording.calls,
                [beginners(self.recording, begin) for begin in bounds[1:-1]],
                stages,
                [where for where in self.recording.marks if where not in marked],
            ),
        )

    def _notes(self, one_thread: bool) -> Iterator[str]:
        if self.to.stages > 1 and one_thread:
            yield "operations are small: steps run in one thread, as the plain loop does"
        lanes, cores = len(set(self.to.lanes)), os.cpu_count() or 1
        if not self.to.is_asynchronous and not one_thread and lanes > cores:
            yield f"{lanes} CPU stages share {cores} cores: a step takes longer than predicted"
        torn = [held.names for held in self.recording.parameters if len(held.names) > 1]
        for names in torn:
            yield f"tied: {' = '.join(names)} lives where it is read first"

    def _bottleneck(self, shares: list[StageShare], bounds: list[int]) -> str:
        """What keeps the costliest stage from being cheaper."""
        show = UNITS[self.to.by]
        worst = max(shares, key=lambda share: share.cost)
        mean = sum(share.cost for share in shares) / len(shares)
        begin, end = bounds[worst.stage], bounds[worst.stage + 1]
        told = f"the costliest stage: {worst.stage}, {show(worst.cost)}"
        if len(shares) > 1 and mean:
            told += f", {100 * (worst.cost / mean - 1):.1f} % over the mean"
        if worst.segments == 1:
            return f"{told}; it cannot be split{self._why_closed(begin, end)}"
        others = []
        cuts = [index for index in range(begin + 1, end) if self.closed[index] is None]
        for beside, new in (
            (worst.stage - 1, [cuts[0], end]),
            (worst.stage + 1, [begin, cuts[-1]]),
        ):
            if 0 <= beside < len(shares):
                here = float(self.costing.cost(worst.stage)[new[0], new[1]])
                span = (
                    (bounds[beside], cuts[0])
                    if beside < worst.stage
                    else (cuts[-1], bounds[beside + 1])
                )
                there = float(self.costing.cost(beside)[span[0], span[1]])
                what = self._name(begin if beside < worst.stage else cuts[-1])
                others.append(
                    f"with {what} on stage {beside}, stages {worst.stage} and {beside} would cost "
                    f"{show(here)} and {show(there)}"
                )
        return "; ".join([told, *others])

    def _name(self, segment: int) -> str:
        found = beginners(self.recording, segment)
        return found[0].path if found else "the start"

    def _why_closed(self, begin: int, end: int) -> str:
        """Why no stage begins inside of a stretch."""
        reasons = dict.fromkeys(why for why in self.closed[max(begin, 0) + 1 : end] if why)
        if not reasons:
            return ": no module is called in it" if end - begin == 1 else ""
        return ": " + ", ".join(list(reasons)[:3])


def _check(model: object, by: object, loss_fn: object, target: object, speeds: object) -> None:
    if isinstance(model, ModuleInterface):
        raise UsageError(
            f"balance takes the model, but {type(model).__name__} came ({users_line()}); pass its "
            ".module"
        )
    if by not in tuple(UNITS):
        raise UsageError(
            f"by is one of {', '.join(map(repr, UNITS))}, but {by!r} came ({users_line()})"
        )
    check_loss(loss_fn, target)
    if speeds is not None and by == "memory":
        raise PlanError(
            "speeds do not change what a stage keeps; pass limits=, or balance by='time' "
            f"({users_line()})"
        )


def _named_at(model: nn.Module, at: str | Sequence[str] | None) -> set[str] | None:
    """The paths of the modules that ``at`` names."""
    if at is None:
        return None
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    patterns = [at] if isinstance(at, str) else at
    return {path for pattern in patterns for path in matching_paths(pattern, paths)}


def _places(model: nn.Module, devices: Sequence[Any] | None, stages: int) -> list[torch.device]:
    """The device of each stage."""
    checked = checked_devices(devices)
    if checked is not None:
        if len(checked) != stages:
            raise PlanError(
                f"devices has one for each of {stages} stages, but {len(checked)} came; name a "
                f"device several times for several stages ({users_line()})"
            )
        return checked
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    where = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    if not is_asynchronous(where):
        return [where] * stages
    return [torch.device(where.type, (where.index or 0) + stage) for stage in range(stages)]


def _checked_limits(limits: Sequence[int] | int | None, stages: int) -> list[float]:
    if limits is None:
        return [inf] * stages
    each = [limits] * stages if isinstance(limits, int | float) else limits
    return checked_numbers("limits", each, stages)
