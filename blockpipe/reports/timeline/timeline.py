"""A timeline: what happened when in a pipeline, or what a schedule would do, to look at.

One class for both, so that what was measured can stand beside what was predicted, in the same
pictures and by the same numbers.
"""

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Self

from ..._common.callsite import users_line
from ..._common.text import one_line
from ...errors import ScheduleError, UsageError
from ...schedules.schedule import Action, Schedule
from ...schedules.simulation import Costs, Simulation, simulate
from .chrome import chrome_trace
from .html import frame, page
from .plot import plot
from .text import gantt, table
from .trace import Event, EventKind, Lane, StepInfo, Trace


class Timeline(Trace):
    """What happened when. Printed, it is a Gantt chart and a table; in a notebook, a page.

    :meth:`Pipeline.profile` makes one of real steps, :meth:`of` one of a schedule. Times are
    seconds from the first event on, or in the unit of the costs that a schedule was played out
    with.

    Example:
        >>> from blockpipe.schedules import make_schedule
        >>> t = Timeline.of(make_schedule("1f1b", [0, 1], 3))
        >>> print(t.gantt(width=32))
        lane 0  FFFF····BBBBFFBBBB··BBBB
                0011    0000221111  2222
        lane 1  ··FFBBBBFFBBBBFFBBBB····
                  000000111111222222
        >>> t.step_time, t.bubble()
        (12.0, 0.25)
    """

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs | None = None, *, unit: str = "") -> Self:
        """A schedule's timeline, before anything runs.

        Args:
            schedule: what every lane does.
            costs: what the actions take; ``None``: F, B and W one unit each, a whole B two.
            unit: ``"s"`` if the costs are in seconds.

        Raises:
            ScheduleError: the schedule cannot run, or the costs do not fit it.
        """
        if unit not in ("", "s"):
            raise ScheduleError(f"the unit of costs is '' or 's' (seconds), but {unit!r} came")
        costs = costs or Costs()
        played = simulate(schedule, costs)
        events = sorted(_events(played, costs), key=lambda e: (e.start, e.end))
        lanes = [Lane(f"lane {lane}") for lane in range(len(schedule.lanes))]
        info = StepInfo(schedule, tuple(range(len(lanes))), costs)
        return cls(events, lanes, [info], unit, schedule.name)

    def predicted(self, step: int = -1, *, measured: bool = True) -> "Timeline | None":
        """The timeline that a step's schedule should have had.

        Args:
            step: which; -1: the last.
            measured: with what each hop was measured to take (the difference to what happened is
                then that of handing over, and of times that vary); otherwise with the recording's
                estimate.

        Returns:
            ``None`` where a hop was never measured, or nothing was estimated.
        """
        if not self.steps:
            return None
        info = self.steps[self._index(step)]
        costs = self.costs(step) if measured else info.costs
        if costs is None:
            return None
        if info.forward_only:
            costs = Costs(costs.forward, 0.0, 0.0, costs.transfer, recompute=0.0)
        found = Timeline.of(info.schedule, costs, unit=self.unit)
        if info.forward_only:
            found.events = [e for e in found.events if e.kind not in "BWR" and e.source < e.hop]
        found.lanes = [self.lanes[lane] for lane in info.lanes]
        found.title = f"{info.schedule.name}, predicted from " + (
            "the measured hops" if measured else "the recording"
        )
        return found

    # --- as text

    def gantt(self, step: int = -1, width: int = 100) -> str:
        """A step as text: for each lane a row of what it does, and a row of the micro-batches
        (their last digit). A character is what takes the most of its time.

        Args:
            step: which; -1: the last.
            width: of a line, in characters, from 20 on.
        """
        if not isinstance(width, int) or width < 20:
            raise UsageError(
                f"width is a number of characters from 20 on, but {width!r} came ({users_line()})"
            )
        return gantt(self, self._index(step), width) if self.steps else ""

    def __str__(self) -> str:
        if not self.events:
            return "nothing ran: an empty timeline"
        last = len(self.steps) - 1
        title = f"{self.title}, step {last + 1} of {last + 1}" if last else self.title
        return f"{one_line(title)}\n\n{self.gantt()}\n\n{table(self, self._predictions())}"

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.title!r}: {len(self.steps)} steps, {len(self.lanes)} lanes, "
            f"{len(self.events)} events>"
        )

    def _predictions(self) -> dict[str, Trace | None]:
        if not self.steps or not any(lane.device for lane in self.lanes):
            return {}
        return {
            "by the recording": self.predicted(measured=False),
            "from the measured hops": self.predicted(),
        }

    # --- as pictures

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Write it in Chrome's trace event format, for https://ui.perfetto.dev.

        Each device is a process and each lane a thread in it, with rows for copies and waits;
        arrows follow the micro-batches from hop to hop. Where costs have no unit, one is shown as
        a second.

        Args:
            path: of the file to write, such as ``"trace.json"``.
        """
        Path(path).write_text(json.dumps(chrome_trace(self)))

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """An interactive page that needs nothing but a browser, and asks no network.

        Args:
            path: of the file to write; ``None``: none is written.

        Returns:
            The page.
        """
        made = page(self._views())
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made

    def plot(self, ax: Any = None, *, step: int = -1) -> Any:
        """A step as a matplotlib figure.

        Args:
            ax: axes to draw on; ``None``: new ones.
            step: which; -1: the last.

        Returns:
            The figure.

        Raises:
            UsageError: matplotlib is not installed (``pip install 'blockpipe[plot]'``).
        """
        return plot(self, self._index(step) if self.steps else 0, ax)

    def _repr_html_(self) -> str:
        return frame(page(self._views()), lanes=len(self.lanes))

    def _views(self) -> list[Trace]:
        return [self, *(view for view in self._predictions().values() if view is not None)]


def _events(played: Simulation, costs: Costs) -> Iterator[Event]:
    """A simulation's actions, with its copies and what runs wait between them."""
    schedule = played.schedule
    split = schedule.split()
    ends: dict[tuple[str, int, int], float] = {}
    begins: list[tuple[float, Action, int]] = []
    for lane, actions in enumerate(schedule.lanes):
        for action, start in zip(actions, played.starts[lane], strict=True):
            kind, hop, m = action
            forward, backward, weight = costs.of(hop)
            took = {
                "F": forward,
                "B": backward - weight if (hop, m) in split else backward,
                "W": weight,
                "R": costs.on(hop).recompute,
            }[kind]
            ends[kind, hop, m] = start + took
            begins.append((start, action, lane))
            yield _event(kind, lane, hop, m, start, start + took)
    for start, (kind, hop, m), lane in begins:
        before = hop - 1 if kind == "F" else hop + 1
        if kind not in ("F", "B") or (kind, before, m) not in ends:
            continue
        sent = arrived = ends[kind, before, m]
        link = min(hop, before)
        if schedule.lane_of_hop[before] != lane:
            arrived += costs.on(link).transfer
        if arrived > sent:
            yield _event("copy", lane, hop, m, sent, arrived, before)
        if kind == "F" and start > arrived:
            yield _event("wait", lane, hop, m, arrived, start)


def _event(
    kind: Any, lane: int, hop: int, m: int, start: float, end: float, source: int = -1
) -> Event:
    made: EventKind = kind
    return Event(made, lane, hop, hop, m, 0, start, end, source)
