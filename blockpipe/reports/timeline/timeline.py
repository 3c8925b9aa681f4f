"""A timeline of the steps of a pipeline, or of a schedule that is played out, to look at.

One class serves both, so that measured and predicted steps are shown by the same pictures and the
same numbers.
"""

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Self

from ..._common.checks import expected, is_integer
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
    """The times of steps. Printed, it is a Gantt chart and a table; in a notebook, a page.

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
        """Return a schedule's timeline, without a run.

        Args:
            schedule: the schedule.
            costs: the times of the actions; ``None`` gives F, B and W one unit each, a whole B two.
            unit: ``"s"`` if the costs are in seconds.

        Raises:
            ScheduleError: the schedule cannot run, or the costs do not fit it.
        """
        if unit not in ("", "s"):
            raise ScheduleError(expected("'' or 's' (seconds)", unit, for_="unit"))
        costs = costs or Costs()
        played = simulate(schedule, costs)
        events = sorted(_events(played, costs), key=lambda e: (e.start, e.end))
        lanes = [Lane(f"lane {lane}") for lane in range(len(schedule.lanes))]
        info = StepInfo(schedule, tuple(range(len(lanes))), costs)
        return cls(events, lanes, [info], unit, schedule.name)

    def predicted(self, step: int = -1, *, measured: bool = True) -> "Timeline | None":
        """Return the timeline that a step's schedule should have had.

        Args:
            step: the number of the step; -1 is the last.
            measured: whether to take the times that each hop was measured to need. The rest of the
                difference to the real step is the cost of handing over, and of times that vary.
                Otherwise the times are the recording's estimates.

        Returns:
            The timeline; ``None`` where a hop was never measured, or nothing was estimated.
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
        """Return a step as text: for each lane a row of actions, and one of micro-batches.

        A character stands for the action that takes the most of its time; for the micro-batch it is
        the last digit of its number.

        Args:
            step: the number of the step; -1 is the last.
            width: the characters of a line, at least 20.

        Raises:
            UsageError: the width is not an integer from 20 up, or there is no such step.
        """
        if not is_integer(width, 20):
            raise UsageError(expected("an integer from 20 up", width, for_="width"))
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
            path: the file to write, such as ``"trace.json"``.
        """
        Path(path).write_text(json.dumps(chrome_trace(self)))

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return an interactive page, which needs a browser and no network.

        Args:
            path: the file to write; ``None`` writes none.

        Returns:
            The page.
        """
        made = page(self._views())
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made

    def plot(self, ax: Any = None, *, step: int = -1) -> Any:
        """Draw a step as a matplotlib figure.

        Args:
            ax: the axes to draw on; ``None`` makes new ones.
            step: the number of the step; -1 is the last.

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
    """Iterate over a simulation's actions, its copies and the waits between them."""
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
