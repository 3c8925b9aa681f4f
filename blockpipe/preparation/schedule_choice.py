"""The schedule that a user's option asks for, made from a name, chosen by cost, or the user's own,
and the lanes of its stages.

A step and a prediction of one read the option here, so that they cannot differ in what they take
it for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._common.callsite import users_line
from .._common.checks import expected
from ..devices.devices import is_asynchronous
from ..errors import ScheduleError
from ..schedules.builders import ScheduleChoice, ScheduleOption, choose, make_schedule
from ..schedules.schedule import Schedule
from ..schedules.simulation import Costs


def lanes_of(devices: Sequence[torch.device], names: Sequence[Any]) -> list[Hashable]:
    """Return the name of each stage's lane.

    It is the accelerator device, or on the CPU the stage itself; CPU devices with an index
    (``"cpu:0"``) are lanes that stages may share.

    Args:
        devices: the device of each stage, checked.
        names: the same devices, as the user gave them.
    """
    given = [torch.device(name) for name in names]
    return [
        device if is_asynchronous(device) else stage if named.index is None else named
        for stage, (device, named) in enumerate(zip(devices, given, strict=True))
    ]


@dataclass(frozen=True)
class ScheduleRequest:
    """The steps that a schedule is for.

    Attributes:
        lane_of_hop: the number of each hop's lane.
        microbatches: the number of micro-batches.
        in_flight: the most micro-batches that may be under way at once; ``None`` sets no limit.
        splits_backward: for each hop, whether its backward may be in two parts; ``None`` means all.
        recomputes: ``(hop, microbatch) -> bool``: whether activations are made again before that
            backward; ``None`` means never.
    """

    lane_of_hop: tuple[int, ...]
    microbatches: int
    in_flight: int | None = None
    splits_backward: Sequence[bool] | None = None
    recomputes: Callable[[int, int], bool] | None = None

    def resolve(
        self, option: ScheduleOption, costs: Callable[[], Costs]
    ) -> tuple[Schedule, ScheduleChoice | None]:
        """Return the schedule of an option, and the choice that it comes from under ``"auto"``.

        Args:
            option: a name, a schedule, or a function that makes one.
            costs: returns the hops' costs; called for ``"auto"`` alone.

        Raises:
            ScheduleError: the name is unknown, or the user's own schedule is for other steps.
        """
        if option == "auto":
            choice = choose(
                self.lane_of_hop,
                self.microbatches,
                costs(),
                in_flight=self.in_flight,
                splits_backward=self.splits_backward,
                recomputes=self.recomputes,
            )
            return choice.schedule, choice
        if isinstance(option, str):
            made = make_schedule(
                option,
                self.lane_of_hop,
                self.microbatches,
                in_flight=self.in_flight,
                splits_backward=self.splits_backward,
            )
            return made, None
        return self._own(option), None

    def _own(self, option: Schedule | Callable[[Sequence[int], int], Schedule]) -> Schedule:
        """Return the user's own schedule, for as many hops and micro-batches as there are."""
        try:
            made: object = (
                option
                if isinstance(option, Schedule)
                else option(self.lane_of_hop, self.microbatches)
            )
        except Exception as error:
            error.add_note(
                f"blockpipe: in the function given as schedule=, called with lane_of_hop="
                f"{self.lane_of_hop} and microbatches={self.microbatches}"
            )
            raise
        if not isinstance(made, Schedule):
            fix = "return schedules.make_schedule(name, lane_of_hop, microbatches), or your own"
            for_ = "the result of the function given as schedule="
            raise ScheduleError(expected("a Schedule", made, for_=for_, fix=fix))
        hops, microbatches = len(made.lane_of_hop), made.microbatches
        if (hops, microbatches) != (len(self.lane_of_hop), self.microbatches):
            raise ScheduleError(
                f"expected a schedule for {len(self.lane_of_hop)} hops and {self.microbatches} "
                f"micro-batches, got {made.name!r} for {hops} hops and {microbatches} "
                f"micro-batches ({users_line()}); pass a function (lane_of_hop, microbatches) -> "
                "Schedule where these numbers vary"
            )
        return made
