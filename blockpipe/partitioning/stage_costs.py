"""The cost of every possible stage, in the quantity that a user wants balanced.

The schedule is used twice: before the cut for the number of micro-batches that a stage holds at
once, which memory depends on; after it for the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ..preparation.prepared import has_one_lane, is_small, runs_inline
from ..schedules.simulation import Costs, Simulation, simulate
from .conditions import Conditions
from .cut_points import SegmentCosts


class StageCosts:
    """The costs of every possible stage, as matrices like those of :class:`SegmentCosts`.

    Args:
        costs: the costs of the recording's segments.
        conditions: the conditions that the stages run under.

    Attributes:
        one_thread: whether nothing can overlap, and no lane idles.
        in_flight: for each stage, the most micro-batches whose activations it holds.
    """

    def __init__(self, costs: SegmentCosts, conditions: Conditions) -> None:
        self.costs = costs
        self.conditions = conditions
        one_lane = has_one_lane(
            conditions.lanes,
            is_small=is_small(costs.recording, conditions.devices, conditions.stages),
        )
        one_by_one = runs_inline(conditions.schedule, conditions.chunks, has_one_lane=one_lane)
        self.one_thread = one_by_one and one_lane
        held = conditions.schedule_for(Costs()).held_at_once()
        self.in_flight = [1] * conditions.stages if one_by_one else held

    def cost(self, stage: int) -> Tensor:
        """Return the quantity that is balanced, for one stage."""
        costs, conditions = self.costs, self.conditions
        first, last = conditions.extra
        extra = first * (stage == 0) + last * (stage == conditions.stages - 1)
        if conditions.by == "memory":
            return self.memory(stage) + extra
        speed = conditions.speeds[stage]
        if conditions.by == "time":
            moved = costs.received + costs.returned if conditions.training else costs.received
            return (costs.seconds + extra) / speed + moved * conditions.link.per_unit
        row = costs.parameters if conditions.by == "parameters" else costs.flops
        return (costs.total(row) + extra) / speed

    def memory(self, stage: int) -> Tensor:
        """Return one stage's peak in bytes."""
        conditions = self.conditions
        return self.costs.memory(
            self.in_flight[stage], conditions.copies, training=conditions.training
        )

    def step(self, bounds: Sequence[int]) -> tuple[float, Simulation | None]:
        """Return the predicted seconds of a step, and its schedule played out.

        Args:
            bounds: the segments that the stages begin with, and the end.

        Returns:
            The simulation is ``None`` where the step runs in one thread, without a schedule.
        """
        conditions = self.conditions
        spans = list(pairwise(bounds))
        forward, backward = (
            [float(row[a:b].sum()) / v for (a, b), v in zip(spans, conditions.speeds, strict=True)]
            for row in (self.costs.forward, self.costs.backward)
        )
        if conditions.by == "time":
            forward[0] += conditions.extra[0] / conditions.speeds[0]
            forward[-1] += conditions.extra[1] / conditions.speeds[-1]
        if self.one_thread:
            return conditions.chunks * (sum(forward) + sum(backward)), None
        received = [float(self.costs.received[span]) for span in spans[1:]]
        costs = Costs(
            forward=forward,
            backward=backward,
            weight=[seconds / 2 for seconds in backward],
            transfer=[*map(conditions.link.seconds, received), 0.0],
            activation=[float(self.costs.saved[span]) for span in spans],
        )
        played = simulate(conditions.schedule_for(costs), costs)
        return played.makespan, played
