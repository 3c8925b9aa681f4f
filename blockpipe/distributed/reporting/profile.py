"""The timeline of steps in several processes: each notes its own actions, and all are gathered."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from ...devices.devices import is_asynchronous
from ...reports.timeline.timeline import Timeline
from ...reports.timeline.trace import Event, Lane, StepInfo
from ...schedules.schedule import Action, Kind, Schedule
from .clock import offset_to_first


class _NotedAction(NamedTuple):
    """An action, with its times on this process's clock."""

    step: int
    kind: Kind
    stage: int
    microbatch: int
    start: int
    end: int


class StageProfile:
    """Observes the stages of this process while a pipeline is profiled.

    An accelerator works on while the host has gone on, so the host waits for it around each
    action: a step that is profiled there is slower.

    Args:
        timeline: is filled at the end.
        device: of this process's stages.
        ranks: the process of each stage.
        stages: the number of each stage in the marks.
        group: the processes; ``None``: all.
    """

    def __init__(
        self,
        timeline: Timeline,
        device: torch.device,
        ranks: Sequence[int],
        stages: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.timeline = timeline
        self._device = device
        self._ranks = ranks
        self._stages = stages
        self._group = group
        self._step = -1
        self._began = 0
        self._noted: list[_NotedAction] = []

    def begin_step(self) -> None:
        """A step begins."""
        self._step += 1

    def begins(self) -> None:
        """An action begins."""
        self._began = self._now()

    def ends(self, kind: Kind, stage: int, microbatch: int) -> None:
        """The action is over."""
        self._noted.append(
            _NotedAction(self._step, kind, stage, microbatch, self._began, self._now())
        )

    def _now(self) -> int:
        if is_asynchronous(self._device):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter_ns()

    def gather(self) -> None:
        """Fill the timeline in every process; all call it together."""
        offset = offset_to_first(self._group, self._device)
        own = [n._replace(start=n.start + offset, end=n.end + offset) for n in self._noted]
        every: list[tuple[str, list[_NotedAction]]] = [("", [])] * dist.get_world_size(self._group)
        dist.all_gather_object(every, (str(self._device), own), group=self._group)
        begun = min((n.start for _, noted in every for n in noted), default=0)
        events = [
            self._event(rank, noted, begun)
            for rank, (_, all_noted) in enumerate(every)
            for noted in all_noted
        ]
        events.sort(key=lambda event: (event.start, event.end))
        self.timeline.events = events
        self.timeline.lanes = [Lane(f"rank {r}, {name}", name) for r, (name, _) in enumerate(every)]
        self.timeline.steps = [self._info(step, events) for step in range(self._step + 1)]

    def _event(self, rank: int, noted: _NotedAction, begun: int) -> Event:
        times = (noted.start - begun) * 1e-9, (noted.end - begun) * 1e-9
        stage = self._stages[noted.stage]
        return Event(noted.kind, rank, noted.stage, stage, noted.microbatch, noted.step, *times)

    def _info(self, step: int, events: list[Event]) -> StepInfo:
        own = [event for event in events if event.step == step]
        lanes: list[list[Action]] = [[] for _ in self.timeline.lanes]
        for event in own:
            lanes[event.lane].append(Action(cast(Kind, event.kind), event.hop, event.microbatch))
        count = 1 + max((event.microbatch for event in own), default=-1)
        is_forward = bool(own) and all(event.kind == "F" for event in own)
        if is_forward:  # a schedule is of a whole step: its backwards would follow
            hops = range(len(self._ranks))
            for microbatch, hop in itertools.product(range(count), reversed(hops)):
                lanes[self._ranks[hop]].append(Action("B", hop, microbatch))
        schedule = Schedule(self.timeline.title, tuple(self._ranks), count, tuple(lanes))
        return StepInfo(schedule, tuple(range(len(lanes))), forward_only=is_forward)
