"""What every stage that could be would cost, for what a user wants balanced.

The schedule comes in twice: before the cut it says how many micro-batches a stage holds at once,
which memory depends on; after it, how long a step of such stages takes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..costs.rates import Line
from ..devices.devices import is_asynchronous
from ..errors import ScheduleError
from ..preparation.prepared import is_small, runs_inline
from ..schedules.builders import ScheduleOption, choose, make_schedule
from ..schedules.schedule import Schedule
from ..schedules.simulation import Costs, Simulation, simulate
from .cut_points import SegmentCosts


@dataclass(frozen=True)
class Conditions:
    """What stages are to run under, checked.

    Attributes:
        stages: how many.
        by: what is balanced.
        chunks: micro-batches of a step.
        schedule: of the steps.
        devices: of the stages.
        lanes: what names each stage's lane.
        speeds: of the stages' devices.
        limits: of their memory, in bytes; infinite: none.
        copies: of each parameter, by the optimizer.
        extra: of the first and the last stage, in the unit of ``by``.
        slack: by what share the costliest stage may cost more.
        link: what a crossing takes, over its bytes.
        training: with a backward.
    """

    stages: int
    by: str
    chunks: int
    schedule: ScheduleOption
    devices: list[torch.device]
    lanes: list[Hashable]
    speeds: list[float]
    limits: list[float]
    copies: float
    extra: tuple[float, float]
    slack: float
    link: Line
    training: bool

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages are on accelerators."""
        return any(is_asynchronous(device) for device in self.devices)

    @property
    def lane_of_stage(self) -> list[int]:
        """The number of each stage's lane."""
        numbers: dict[Hashable, int] = {}
        return [numbers.setdefault(lane, len(numbers)) for lane in self.lanes]

    def made(self, costs: Costs) -> Schedule:
        """The schedule, of as many hops as there are stages.

        Raises:
            ScheduleError: one of the user's own that is for something else.
        """
        option, lanes = self.schedule, self.lane_of_stage
        if not self.training:
            return make_schedule("gpipe", lanes, self.chunks)
        if option == "auto":
            return choose(lanes, self.chunks, costs).schedule
        if isinstance(option, str):
            name = "sequential" if option == "uncut" else option
            return make_schedule(name, lanes, self.chunks, costs=costs)
        found = option(lanes, self.chunks) if callable(option) else option
        if not isinstance(found, Schedule):
            raise ScheduleError(
                "schedule is a name, a Schedule, or a function (lane_of_hop, microbatches) -> "
                f"Schedule, but {found!r} came"
            )
        if len(found.lane_of_hop) != self.stages or found.microbatches != self.chunks:
            raise ScheduleError(
                f"schedule {found.name!r} is for {len(found.lane_of_hop)} hops and "
                f"{found.microbatches} micro-batches, but there are stages={self.stages} and "
                f"chunks={self.chunks}"
            )
        return found


class StageCosts:
    """Costs under some conditions; matrices as :class:`Chain` has them.

    Args:
        chain: of the recording.
        conditions: what the stages run under.

    Attributes:
        one_thread: whether nothing can overlap, and no lane idles.
        in_flight: for each stage, the most micro-batches whose activations it holds.
    """

    def __init__(self, costs: SegmentCosts, conditions: Conditions) -> None:
        self.costs = costs
        self.conditions = conditions
        to = conditions
        small = not to.is_asynchronous and is_small(costs.recording, to.stages)
        has_one_lane = len(set(to.lanes)) == 1 or small
        one_by_one = runs_inline(to.schedule, to.chunks, has_one_lane=has_one_lane)
        self.one_thread = one_by_one and has_one_lane
        held = to.made(Costs()).held_at_once()
        self.in_flight = [1] * to.stages if one_by_one else held

    def cost(self, stage: int) -> Tensor:
        """What is balanced, of one stage."""
        costs, to = self.costs, self.conditions
        extra = to.extra[0] * (stage == 0) + to.extra[1] * (stage == to.stages - 1)
        if to.by == "memory":
            return self.memory(stage) + extra
        if to.by == "time":
            moved = costs.received + costs.returned if to.training else costs.received
            return (costs.seconds + extra) / to.speeds[stage] + moved * to.link.per_unit
        row = costs.parameters if to.by == "parameters" else costs.flops
        return (costs.total(row) + extra) / to.speeds[stage]

    def memory(self, stage: int) -> Tensor:
        """One stage's peak, in bytes."""
        to = self.conditions
        return self.costs.memory(self.in_flight[stage], to.copies, training=to.training)

    def step(self, bounds: Sequence[int]) -> tuple[float, Simulation | None]:
        """The predicted time of a step, and the schedule played out; in one thread there is none.

        Args:
            bounds: segments that they begin with, and the end.
        """
        to = self.conditions
        pairs = list(pairwise(bounds))
        forward, backward = (
            [float(row[a:b].sum()) / v for (a, b), v in zip(pairs, to.speeds, strict=True)]
            for row in (self.costs.forward, self.costs.backward)
        )
        if to.by == "time":
            forward[0] += to.extra[0] / to.speeds[0]
            forward[-1] += to.extra[1] / to.speeds[-1]
        if self.one_thread:
            return to.chunks * (sum(forward) + sum(backward)), None
        costs = Costs(
            forward=forward,
            backward=backward,
            weight=[seconds / 2 for seconds in backward],
            transfer=[to.link.seconds(float(self.costs.received[a, b])) for a, b in pairs[1:]]
            + [0.0],
            activation=[float(self.costs.saved[a, b]) for a, b in pairs],
        )
        played = simulate(to.made(costs), costs)
        return played.makespan, played
