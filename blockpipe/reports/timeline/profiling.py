"""Collect the events of steps and their times for a timeline.

Work that is queued on an accelerator is timed by events on the streams that do it; elsewhere times
are the host's, taken in the thread that works. Both are seconds on one axis: at its first step the
host waits for a device once, which relates their clocks. No event is read before the end, so no
step waits for its own measurement.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...costs.work import size_of
from ...devices.devices import current_stream, is_asynchronous
from ...devices.observer import Moment, Watch
from ...preparation.prepared import Prepared
from ...schedules.schedule import Kind, Schedule
from .timeline import Timeline
from .trace import Event, EventKind, Lane, StepInfo


class _Point(NamedTuple):
    """A point in time of a stream, known once its event has happened."""

    device: torch.device
    event: torch.Event


Time = int | _Point  # the host's: nanoseconds


def _now(stream: torch.Stream | None) -> Time:
    """Return the host's time, or the time when a stream gets to this point."""
    if stream is None:
        return time.perf_counter_ns()
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return _Point(stream.device, event)


class _NotedEvent(NamedTuple):
    """An event whose times are not read yet."""

    kind: EventKind
    hop: int
    stage: int
    microbatch: int
    start: Time
    end: Time
    source: int = -1
    bytes: int = 0


class _DeviceClock:
    """A device's clock on the host's axis: an event, and the host's seconds when it happened.

    The time between two events is a 32-bit float, so each step counts from an event of its own.
    """

    def __init__(self, device: torch.device) -> None:
        stream = current_stream(device)
        assert stream is not None
        torch.accelerator.synchronize(device)
        # The host sees an event with some delay: take the one with the least of several.
        tries = [self._seen(device, stream) for _ in range(5)]
        _, self.at, self.event = min(tries, key=lambda seen: seen[0])

    @staticmethod
    def _seen(device: torch.device, stream: torch.Stream) -> tuple[float, float, torch.Event]:
        """Return the seconds that it took to see an event, its time, and the event."""
        event = torch.Event(device, enable_timing=True)
        begun = time.perf_counter_ns() * 1e-9
        event.record(stream)
        event.synchronize()
        over = time.perf_counter_ns() * 1e-9
        return over - begun, (begun + over) / 2, event

    def move(self, event: torch.Event) -> None:
        """Count from a later event from now on."""
        self.at += 1e-3 * self.event.elapsed_time(event)
        self.event = event

    def seconds(self, event: torch.Event) -> float:
        return self.at + 1e-3 * self.event.elapsed_time(event)


class _StepProfile:
    """Observes one step: notes when actions begin and end, and when copies are made.

    The threads of a step share it without a lock: each open action belongs to one thread, and a
    list's ``append`` is atomic.
    """

    def __init__(self, prepared: Prepared, microbatches: int, starts: dict[torch.device, Any]):
        self.route, self.devices = prepared.route, prepared.devices
        self.names = prepared.lane_of_stage
        self.schedule: Schedule | None = None
        self.in_turns = partial(prepared.schedule, "sequential", microbatches)
        self.prepared = prepared
        self.starts = starts
        self.noted: list[_NotedEvent] = []
        self.is_over = False
        self._open: dict[tuple[str, int, int], tuple[int, Time]] = {}

    @property
    def failed(self) -> bool:
        """Whether an action did not end."""
        return any(kind != "wait" for kind, _, _ in self._open) or not self.noted

    def plays(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def begins(self, kind: Kind | Literal["wait"], hop: int, stage: int, microbatch: int) -> None:
        if not self.is_over:
            self._open[kind, hop, microbatch] = stage, self._now(kind, stage)

    def ends(self, kind: Kind | Literal["wait"], hop: int, microbatch: int) -> None:
        stage, start = self._open.pop((kind, hop, microbatch), (0, None))
        if start is None or self.is_over or (kind == "wait" and self.schedule is None):
            return  # one thread has nothing to wait for
        end = self._now(kind, stage)
        self.noted.append(_NotedEvent(kind, hop, stage, microbatch, start, end))

    def _now(self, kind: str, stage: int) -> Time:
        # A run waits in a thread of the host, whatever device its stage is on.
        return _now(None if kind == "wait" else current_stream(self.devices[stage]))

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch:
        size = size_of(tensor)
        since: dict[str, Time] = {}

        def watch(moment: Moment, stream: torch.Stream | None) -> None:
            if self.is_over:
                return
            if moment in ("sends", "waits"):
                since[moment] = _now(stream)
                return
            kind: EventKind = "copy" if moment == "arrives" else "stall"
            if kind == "stall" and stream is None and from_hop > to_hop:
                return  # the thread of the sender waits
            start = since["sends" if kind == "copy" else "waits"]
            stage = self.route[min(to_hop, len(self.route) - 1)]
            where = kind, to_hop, stage, microbatch, start, _now(stream), from_hop
            self.noted.append(_NotedEvent(*where, size if kind == "copy" else 0))

        return watch

    def info(self, lanes: dict[tuple[Any, ...], int]) -> StepInfo:
        """Return the step's description, and number its lanes in the timeline."""
        schedule = self.in_turns() if self.schedule is None else self.schedule
        numbers = []
        for lane in range(len(schedule.lanes)):
            hops = [h for h, other in enumerate(schedule.lane_of_hop) if other == lane]
            on = {self.names[self.route[h]]: self.route[h] for h in hops}
            name = self.devices[self.route[hops[0]]], tuple(sorted(set(on.values()))), tuple(on)
            numbers.append(lanes.setdefault(name, len(lanes)))
        ran = {noted.kind for noted in self.noted}
        return StepInfo(
            schedule,
            tuple(numbers),
            self.prepared.costs,
            inline=self.schedule is None,
            forward_only="F" in ran and "B" not in ran,
            failed=self.failed,
        )

    def lane(self, noted: _NotedEvent, info: StepInfo) -> int:
        """Return the lane of an event. An uncut route may be longer than the recorded one."""
        hop = noted.hop
        if hop >= len(self.route) or self.route[hop] != noted.stage:
            hop = self.route.index(noted.stage) if noted.stage in self.route else 0
        return info.lanes[info.schedule.lane_of_hop[hop]]


class Profile:
    """Collects the steps of a pipeline while it is profiled.

    Args:
        timeline: the timeline, which is filled at the end.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._steps: list[_StepProfile] = []
        self._clocks: dict[torch.device, _DeviceClock] = {}
        self._lock = threading.Lock()

    def step(self, prepared: Prepared, microbatches: int) -> _StepProfile:
        """Return the observer of a step that is about to begin."""
        with self._lock:
            starts: dict[torch.device, torch.Event] = {}
            for device in dict.fromkeys(filter(is_asynchronous, prepared.devices)):
                if device not in self._clocks:
                    self._clocks[device] = _DeviceClock(device)
                point = _now(current_stream(device))
                assert isinstance(point, _Point)
                starts[device] = point.event
            step = _StepProfile(prepared, microbatches, starts)
            self._steps.append(step)
            return step

    def close(self) -> None:
        """Read the times and fill the timeline. Later events are not noted."""
        for step in self._steps:
            step.is_over = True
        for device in self._clocks:
            torch.accelerator.synchronize(device)
        lanes: dict[tuple[Any, ...], int] = {}
        events: list[Event] = []
        infos = []
        for number, step in enumerate(self._steps):
            for device, event in step.starts.items():
                self._clocks[device].move(event)
            info = step.info(lanes)
            infos.append(info)
            for n in step.noted:
                where = n.kind, step.lane(n, info), n.hop, n.stage, n.microbatch, number
                times = self._seconds(n.start), self._seconds(n.end)
                events.append(Event(*where, *times, n.source, n.bytes))
        self._steps, self._clocks = [], {}
        begun = min((event.start for event in events), default=0.0)
        moved = (e._replace(start=e.start - begun, end=e.end - begun) for e in events)
        self.timeline.events = sorted(moved, key=lambda e: (e.start, e.end))
        self.timeline.lanes = [_named(*lane) for lane in lanes]
        self.timeline.steps = infos

    def _seconds(self, time_: Time) -> float:
        if isinstance(time_, int):
            return time_ * 1e-9
        return self._clocks[time_.device].seconds(time_.event)


def _named(device: torch.device, stages: tuple[int, ...], names: tuple[Any, ...]) -> Lane:
    if is_asynchronous(device):
        return Lane(str(device), str(device))
    given = [str(name) for name in names if isinstance(name, torch.device)]
    if given:
        return Lane(", ".join(given), str(device))
    return Lane(f"cpu, stage {', '.join(map(str, stages))}", str(device))


@contextmanager
def collected(profile: Profile) -> Iterator[Timeline]:
    """While entered, collect steps; at the end fill the timeline, even if a step has failed."""
    try:
        yield profile.timeline
    except BaseException:
        with suppress(RuntimeError):  # a device that has failed raises again
            profile.close()
        raise
    profile.close()
