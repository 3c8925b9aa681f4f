"""The search for the cuts of one model: the best that a pipeline can carry out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NoReturn

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.text import bytes_text
from ..batches.step_arguments import StepArguments
from ..costs.rates import Rates
from ..errors import BlockpipeError, PlanError
from ..recording.record import record
from ..recording.recording import Recording
from ..stages.assignment import Assignment
from ..stages.plan import StagePlan
from .conditions import Conditions
from .cut_points import SegmentCosts, beginners, cut_depth_penalty, why_closed
from .optimum import best_bounds
from .stage_costs import StageCosts
from .timing.segment_timing import SegmentTimes


class CutSearch:
    """The search for one model's cuts.

    Args:
        model: the model to cut.
        sample: the arguments of one micro-batch.
        recording: its recording in one stage.
        conditions: the conditions that the stages run under.

    Attributes:
        closed: for each segment the reason why no stage can begin with it, or ``None``.
        costs: the costs of the stages, by the times that are known so far.
        source: where the costs come from.
        notes: notes for the plan.
    """

    def __init__(
        self, model: nn.Module, sample: StepArguments, recording: Recording, conditions: Conditions
    ) -> None:
        self.model, self.sample = model, sample
        self.recording, self.conditions = recording, conditions
        self.closed = why_closed(recording, conditions.at)
        no_times_yet = [0.0] * len(recording.segments)
        self._take_times(no_times_yet, no_times_yet)
        self.source = ""
        self.notes: list[str] = []

    def _take_times(self, forward: Sequence[float], backward: Sequence[float]) -> None:
        rows = [torch.tensor(row, dtype=torch.double) for row in (forward, backward)]
        of_segments = SegmentCosts(self.recording, rows[0], rows[1], self.conditions.devices)
        self.costs = StageCosts(of_segments, self.conditions)

    def estimate_times(self, rates: Rates) -> None:
        """Take the times of the recorded work at a device's rates."""
        segments = self.recording.segments
        self._take_times(
            [rates.forward(segment.work) for segment in segments],
            [rates.backward(segment.work) for segment in segments],
        )
        self.source = "estimated" if self.conditions.by == "time" else "from the recording"
        self.notes.append(f"times are estimated by rates {rates.source}")

    def use_measured(self, times: SegmentTimes) -> None:
        """Take measured times."""
        self._take_times(times.forward, times.backward)
        threads = "" if self.conditions.is_asynchronous else f", {times.threads} thread(s)"
        crowd = f", {times.crowded:.2f} × for lanes beside it" if times.crowded > 1 else ""
        self.source = f"measured on {times.device}{threads}{crowd}"
        if times.stamped > 1.1 * times.step:
            self.notes.append(
                f"measuring slowed a micro-batch down to {times.stamped / times.step:.2f} × its "
                "time: the times of small segments are inexact"
            )

    @property
    def open(self) -> list[int]:
        """The segments that a stage can begin with, but for the first."""
        return [index for index, why in enumerate(self.closed) if why is None]

    def run(self) -> tuple[StagePlan, list[int]]:
        """Return the best plan that can be carried out, and the bounds of its stages.

        Raises:
            PlanError: there are too few cuts, or none that keeps to the limits.
        """
        while True:
            bounds = self._best_bounds()
            try:
                recording = self._recorded(bounds)
            except BlockpipeError as error:
                self._close(bounds, error)
                continue
            return recording.plan, bounds

    def _recorded(self, bounds: Sequence[int]) -> Recording:
        """Return the model's recording with a plan of these stages.

        Raises:
            BlockpipeError: the plan cannot be carried out.
        """
        entries = [Assignment(*call, stage) for call, stage in self.stages(bounds).items()]
        recording = record(
            self.model,
            self.sample.args,
            self.sample.kwargs,
            plan=StagePlan(entries),
            intended=self.conditions.devices,
        )
        if recording.route != list(range(len(bounds) - 1)):
            raise PlanError(f"the route is {recording.route}")
        if recording.shared_state:
            raise PlanError(f"several stages read or write {recording.shared_state[0].name}")
        if recording.shared_changes:
            raise PlanError(f"several stages see the changes of {recording.shared_changes[0].what}")
        if recording.shared_generators:
            raise PlanError(
                f"several stages draw from one generator ({recording.shared_generators[0].where})"
            )
        return recording

    def _close(self, bounds: Sequence[int], error: BlockpipeError) -> None:
        """Close those of a plan's cuts that cannot even be made alone.

        Raises:
            BlockpipeError: the plan's own error; each of its cuts can be made alone.
        """
        reasons = {}
        for cut in bounds[1:-1]:
            try:
                self._recorded([0, cut, len(self.recording.segments)])
            except BlockpipeError as alone:
                reasons[cut] = str(alone)
        if not reasons:
            raise error
        for cut, why in reasons.items():
            self.closed[cut] = why

    def stages(self, bounds: Sequence[int]) -> dict[tuple[str, int], int]:
        """Return the stage of each module call, in order, by the call's path and number."""
        found = {}
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            for segment in self.recording.segments[begin:end]:
                for call in map(self.recording.calls.__getitem__, segment.calls):
                    if call.is_module:
                        found[call.path, call.call] = stage
        return found

    def _best_bounds(self) -> list[int]:
        """Return the segments that the stages of the best plan begin with, and the end."""
        conditions, segments = self.conditions, len(self.recording.segments)
        at = torch.tensor([0, *self.open, segments])
        if len(at) - 1 < conditions.stages:
            raise PlanError(
                f"{self.recording.model} can be cut at {len(self.open)} places, into at most "
                f"{len(self.open) + 1} stages, but stages={conditions.stages} "
                f"({users_line()}){self.why_closed(0, segments)}"
            )
        costs, excess = [], []
        for stage in range(conditions.stages):
            cost = self.costs.cost(stage)[at][:, at]
            over = torch.full_like(cost, -torch.inf)
            if conditions.limits[stage] < inf:
                over = self.costs.memory(stage)[at][:, at] - conditions.limits[stage]
                cost = torch.where(over <= 0, cost, torch.inf)
            costs.append(cost)
            excess.append(over)
        # Ties go to outer modules. Byte counts are integers, so penalties that add up to less than
        # 1 only decide between equals.
        penalty = cut_depth_penalty(self.recording, at[:-1].tolist()) / conditions.stages
        crossing = (
            self.costs.costs.received[at][:, at] + nn.functional.pad(penalty, (0, 1))[:, None]
        )
        found = best_bounds(costs, crossing, slack=conditions.slack)
        if found is None:
            self._refuse(best_bounds(excess, crossing), excess, at)
        return [int(at[index]) for index in found]

    def _refuse(self, bounds: list[int] | None, excess: list[Tensor], at: Tensor) -> NoReturn:
        """Raise the error that says by how much the best choice exceeds the limits."""
        assert bounds is not None  # there are enough cuts
        over = [float(e[span]) for e, span in zip(excess, pairwise(bounds), strict=True)]
        stage = max(range(len(over)), key=over.__getitem__)
        limits = self.conditions.limits
        shown = [bytes_text(round(limit)) if limit < inf else None for limit in limits]
        raise PlanError(
            f"no cut of {self.recording.model} into {self.conditions.stages} stages keeps to "
            f"limits={shown}: in the best one, "
            f"stage {stage} (from {self.name(int(at[bounds[stage]]))}) needs "
            f"{bytes_text(round(limits[stage] + over[stage]))}, {bytes_text(ceil(over[stage]))} "
            f"more than its {bytes_text(round(limits[stage]))} ({users_line()}); take more stages, "
            "smaller micro-batches, or an optimizer that keeps less"
        )

    def name(self, segment: int) -> str:
        """Return the path of the module that begins a segment."""
        found = beginners(self.recording, segment)
        return found[0].path if found else "the start"

    def why_closed(self, begin: int, end: int) -> str:
        """Return the reasons why no stage begins inside of a stretch, behind a colon."""
        reasons = dict.fromkeys(why for why in self.closed[max(begin, 0) + 1 : end] if why)
        if not reasons:
            return ": no module is called in it" if end - begin == 1 else ""
        return ": " + ", ".join(list(reasons)[:3])
