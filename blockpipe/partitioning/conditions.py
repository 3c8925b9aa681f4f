"""The conditions that stages are to run under: the arguments of :func:`balance`, checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from .._common.callsite import users_line
from ..costs.probing import copy_line
from ..costs.rates import Line, straight
from ..devices.devices import checked_devices, is_asynchronous
from ..errors import PlanError
from ..preparation.schedule_choice import ScheduleRequest
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from ..schedules.simulation import Costs
from ..stages.path_patterns import matching_paths
from .checked_numbers import checked_number, checked_numbers


@dataclass(frozen=True)
class Conditions:
    """The conditions that stages are to run under.

    Attributes:
        stages: the number of stages.
        by: the quantity that is balanced, a key of ``UNITS``.
        chunks: the number of micro-batches of a step.
        schedule: the schedule option of the steps.
        devices: the stages' devices.
        lanes: for each stage an object that names its lane.
        speeds: the speeds of the stages' devices.
        limits: the bytes that each stage may need; infinite where there is no limit.
        copies: the copies of each parameter that the optimizer keeps.
        extra: the costs that the first and the last stage have beside the model's, in the unit of
            ``by``.
        slack: the share by which the costliest stage may cost more than it must.
        link: the time that a crossing takes, as a line over its bytes.
        training: whether there is a backward.
        at: the paths of the modules that stages may begin with; ``None``: any.
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
    at: frozenset[str] | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages are on accelerators."""
        return any(is_asynchronous(device) for device in self.devices)

    @property
    def lane_of_stage(self) -> tuple[int, ...]:
        """The number of each stage's lane."""
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault(lane, len(numbers)) for lane in self.lanes)

    def schedule_for(self, costs: Costs) -> Schedule:
        """Return the schedule, of as many hops as there are stages.

        Args:
            costs: the stages' costs, which ``schedule="auto"`` chooses by.

        Raises:
            ScheduleError: it is the user's own, and for other hops or micro-batches.
        """
        option = self.schedule if self.training else "gpipe"
        request = ScheduleRequest(self.lane_of_stage, self.chunks)
        return request.resolve("sequential" if option == "uncut" else option, lambda: costs)[0]


def stage_devices(
    model: nn.Module, devices: Sequence[Any] | None, stages: int
) -> list[torch.device]:
    """Return the device of each stage.

    Args:
        model: the model. Without ``devices``, the stages are where it is; on an accelerator, the
            first of them is, and each further stage is on the next device.
        devices: the devices as the user named them, or ``None``.
        stages: the number of stages.

    Raises:
        PlanError: there are more or fewer devices than stages.
    """
    checked = checked_devices(devices)
    if checked is not None:
        if len(checked) != stages:
            raise PlanError(
                f"expected {stages} devices, one for each stage, for devices, got {len(checked)} "
                f"({users_line()}); name a device several times for several stages"
            )
        return checked
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    where = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    if not is_asynchronous(where):
        return [where] * stages
    return [torch.device(where.type, (where.index or 0) + stage) for stage in range(stages)]


def modules_named(model: nn.Module, patterns: str | Sequence[str] | None) -> frozenset[str] | None:
    """Return the paths of the modules that patterns name; ``None`` where there are no patterns.

    Raises:
        MarkError: a pattern names no module.
    """
    if patterns is None:
        return None
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    each = [patterns] if isinstance(patterns, str) else patterns
    return frozenset(path for pattern in each for path in matching_paths(pattern, paths))


def checked_limits(limits: Sequence[int] | int | None, stages: int) -> list[float]:
    """Return the limit of each stage in bytes, infinite where there is none."""
    if limits is None:
        return [inf] * stages
    each = [limits] * stages if isinstance(limits, int | float) else limits
    return checked_numbers("limits", each, stages)


def checked_speeds(speeds: Sequence[float] | None, by: str, stages: int) -> list[float]:
    """Return the speed of each stage's device.

    Raises:
        PlanError: speeds are given, and memory is balanced, which they do not change.
    """
    if speeds is None:
        return [1.0] * stages
    if by == "memory":
        raise PlanError(
            f"speeds= does not change the memory that a stage needs ({users_line()}); pass "
            "limits=, or balance by='time'"
        )
    return checked_numbers("speeds", speeds, stages)


def link_between(devices: Sequence[torch.device], bandwidth: float | None) -> Line:
    """Return the time of a crossing over its bytes.

    Args:
        devices: the stages' devices.
        bandwidth: bytes per second; ``None`` times copies between the first two devices that
            differ. Where there is one device a crossing takes no time.
    """
    if bandwidth is not None:
        return straight(0.0, checked_number("bandwidth", bandwidth, positive=True))
    return copy_line(devices[0], next((d for d in devices if d != devices[0]), devices[0]))
