"""The events of steps as data, and their sums.

A trace comes from a real run or from a schedule that is played out; pictures are drawn from either.
It holds numbers and names, and no tensor.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from ..._common.checks import expected, is_integer
from ...errors import UsageError
from ...schedules.schedule import KINDS, Schedule
from ...schedules.simulation import Costs

EventKind = Literal["F", "B", "W", "R", "copy", "wait", "stall"]


class Event(NamedTuple):
    """An event: an action, a copy, or a wait.

    Attributes:
        kind: an action's (``"F"``, ``"B"``, ``"W"``, ``"R"``); ``"copy"`` for a tensor that crosses
            between hops; ``"wait"`` for a run that waits for its turn on a hop; ``"stall"`` for a
            lane that stands still in an action until a tensor has arrived.
        lane: the number of the lane; for a copy or a wait, the lane of the hop that it is for.
        hop: the hop; for a copy, its destination.
        stage: the hop's stage.
        microbatch: the micro-batch.
        step: the step of the trace, from 0.
        start: the time of the start in the trace's unit, from its first event on.
        end: the time of the end.
        source: the hop that a copy comes from; -1 is the caller.
        bytes: the size of the tensor that is copied, even if it is only aliased.

    Example:
        >>> from blockpipe.reports import Event
        >>> event = Event("F", lane=0, hop=1, stage=1, microbatch=2, step=0, start=0.5, end=0.75)
        >>> str(event), event.duration
        ('F1.2', 0.25)
    """

    kind: EventKind
    lane: int
    hop: int
    stage: int
    microbatch: int
    step: int
    start: float
    end: float
    source: int = -1
    bytes: int = 0

    @property
    def duration(self) -> float:
        """The time from start to end."""
        return self.end - self.start

    def __str__(self) -> str:
        if self.kind in KINDS:
            return f"{self.kind}{self.hop}.{self.microbatch}"
        source = f" from {'the caller' if self.source < 0 else f'hop {self.source}'}"
        to = f" to hop {self.hop}.{self.microbatch}"
        return f"{self.kind}{source if self.kind == 'copy' else ''}{to}"


@dataclass(frozen=True)
class Lane:
    """A lane, which runs one action at a time.

    Attributes:
        name: a name to show, such as ``"cuda:0"`` or ``"cpu, stage 1"``.
        device: its device; empty for a schedule that has not run.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> with pipe.profile() as trace:
        ...     loss = pipe.forward_backward(x, target=y, loss_fn=torch.nn.functional.mse_loss).loss
        >>> trace.lanes[1]
        Lane(name='cpu, stage 1', device='cpu')
    """

    name: str
    device: str = ""


@dataclass(frozen=True)
class StepInfo:
    """The description of a step.

    Attributes:
        schedule: the schedule that it followed.
        lanes: for each lane of the schedule, its number in the trace.
        costs: the hops' costs by the recording's estimate; ``None`` if they are not known.
        inline: whether one thread ran all lanes.
        forward_only: whether there was no backward.
        failed: whether an action did not end.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> with torch.no_grad(), pipe.profile() as trace:
        ...     out = pipe(torch.ones(8, 4))
        >>> trace.steps[0].forward_only, trace.steps[0].failed
        (True, False)
    """

    schedule: Schedule
    lanes: tuple[int, ...]
    costs: Costs | None = None
    inline: bool = False
    forward_only: bool = False
    failed: bool = False


@dataclass
class LaneTotals:
    """The times of one lane in a step, in the trace's unit; for several steps, their means.

    Attributes:
        busy: the time in actions, without stalls.
        idle: the share of the step in which it was not busy, 0 to 1.
        by_kind: the time in actions of each kind.
        copies: the time in copies to it, which may overlap with each other and with actions.
        copied: the bytes that were copied to it.
        waits: the time that runs waited for their turns on it, added up.
        stalls: the time that it stood still in actions.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> with pipe.profile() as trace:
        ...     loss = pipe.forward_backward(x, target=y, loss_fn=torch.nn.functional.mse_loss).loss
        >>> first = trace.totals(0)[0]
        >>> 0 < first.busy <= trace.span(0), first.by_kind["R"]
        (True, 0.0)
    """

    busy: float = 0.0
    idle: float = 0.0
    by_kind: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    copies: float = 0.0
    copied: float = 0.0
    waits: float = 0.0
    stalls: float = 0.0


@dataclass
class Trace:
    """The events of steps. Steps are counted from 0, or from the last one, which is -1.

    Attributes:
        events: the events, ordered by their start.
        lanes: the lanes that they ran on.
        steps: the description of each step.
        unit: ``"s"``, or empty where costs have no unit.
        title: a title for pictures.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> with pipe.profile() as trace:
        ...     loss = pipe.forward_backward(x, target=y, loss_fn=torch.nn.functional.mse_loss).loss
        >>> len(trace.steps), len(trace.actions())
        (1, 16)
    """

    events: list[Event] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    steps: list[StepInfo] = field(default_factory=list)
    unit: str = "s"
    title: str = ""

    def actions(self, step: int | None = None) -> list[Event]:
        """Return forwards, backwards, weight parts and recomputations: of one step, or of all."""
        step = step if step is None else self._index(step)
        return [e for e in self.events if e.kind in KINDS and step in (None, e.step)]

    def span(self, step: int) -> float:
        """Return the time from the start of a step's first action to the end of its last."""
        actions = self.actions(step)
        if not actions:
            return 0.0
        return max(e.end for e in actions) - min(e.start for e in actions)

    @property
    def step_time(self) -> float:
        """The mean time of a step."""
        return sum(map(self.span, self._ran())) / max(1, len(self._ran()))

    def busy(self, step: int | None = None) -> list[float]:
        """Return each lane's time in actions, without stalls: of one step, or the mean."""
        return [lane.busy for lane in self.totals(step)]

    def bubble(self, step: int | None = None) -> float:
        """Return the share of all lanes' time in which they are not busy, 0 to 1.

        Args:
            step: the number of a step; ``None``: the share in all of them.
        """
        steps = self._ran() if step is None else [step]
        spans = sum(map(self.span, steps)) / max(1, len(steps))
        # A lane that is always busy may round to more than its span.
        return max(0.0, 1 - sum(self.busy(step)) / (len(self.lanes) * spans)) if spans else 0.0

    def imbalance(self, step: int | None = None) -> float:
        """Return the busiest lane's time over the mean of all; 1 if all are equally busy.

        Args:
            step: the number of a step; ``None``: the times in all of them count.
        """
        busy = self.busy(step)
        return max(busy) * len(busy) / sum(busy) if any(busy) else 1.0

    def totals(self, step: int | None = None) -> list[LaneTotals]:
        """Return the times of each lane: in one step, or the means of all."""
        steps = self._ran() if step is None else [self._index(step)]
        found = [LaneTotals() for _ in self.lanes]
        share = 1 / max(1, len(steps))
        stalled = self._stalled()
        for event in self.events:
            if event.step not in steps:
                continue
            lane, took = found[event.lane], share * event.duration
            if event.kind in KINDS:
                took = share * _net(event, stalled[event.lane])
                lane.by_kind[event.kind] += took
                lane.busy += took
                lane.stalls += share * event.duration - took
            elif event.kind == "copy":
                lane.copies += took
                lane.copied += share * event.bytes
            elif event.kind == "wait":
                lane.waits += took
        span = sum(map(self.span, steps)) * share
        for lane in found:
            lane.idle = max(0.0, 1 - lane.busy / span) if span else 0.0
        return found

    def costs(self, step: int = -1) -> Costs | None:
        """Return the costs of each hop for :func:`blockpipe.simulate`.

        They are medians over the micro-batches of all steps with this one's schedule. A transfer
        counts where copies overlap with actions; elsewhere it is a part of them.

        Args:
            step: the number of the step whose schedule it is.

        Returns:
            The costs; ``None`` where a hop has no forward.
        """
        if not self.steps:
            return None
        info = self.steps[self._index(step)]
        alike = {n for n, other in enumerate(self.steps) if other.schedule == info.schedule}
        hops = range(len(info.schedule.lane_of_hop))
        took: dict[tuple[str, int], list[float]] = {}
        sent: dict[tuple[int, int, int], float] = {}
        stalled = self._stalled()
        for event in self.events:
            if event.step not in alike:
                continue
            if event.kind in KINDS:
                net = _net(event, stalled[event.lane])
                took.setdefault((event.kind, event.hop), []).append(net)
            elif event.kind == "copy" and event.hop == event.source + 1 and event.source >= 0:
                key = event.source, event.microbatch, event.step
                sent[key] = sent.get(key, 0.0) + event.duration
        if any(("F", hop) not in took for hop in hops):
            return None

        def of(kind: str) -> list[float]:
            return [median(took.get((kind, hop), [0.0])) for hop in hops]

        overlaps = any(event.kind == "stall" for event in self.events)
        links = [[t for (h, _, _), t in sent.items() if h == hop] for hop in hops]
        weight = of("W")
        return Costs(
            forward=of("F"),
            backward=[b + w for b, w in zip(of("B"), weight, strict=True)],
            weight=weight,
            transfer=[median(link) if link and overlaps else 0.0 for link in links],
            recompute=of("R"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as data for JSON."""
        steps = range(len(self.steps))
        return {
            "title": self.title,
            "unit": self.unit,
            "lanes": [{"name": lane.name, "device": lane.device} for lane in self.lanes],
            "steps": [
                {
                    "schedule": info.schedule.name,
                    "microbatches": info.schedule.microbatches,
                    "inline": info.inline,
                    "forward_only": info.forward_only,
                    "failed": info.failed,
                    "span": self.span(step),
                    "bubble": self.bubble(step),
                    "imbalance": self.imbalance(step),
                    "lanes": [vars(lane) for lane in self.totals(step)],
                }
                for step, info in zip(steps, self.steps, strict=True)
            ],
            "step_time": self.step_time,
            "bubble": self.bubble(),
            "imbalance": self.imbalance(),
            "totals": [vars(lane) for lane in self.totals()],
            "events": [event._asdict() for event in self.events],
        }

    def _index(self, step: int) -> int:
        """Return a step's number, counted from 0."""
        count = len(self.steps)
        if not is_integer(step, -count) or step >= count:
            contract = f"the number of one of {count} steps, from {-count} to {count - 1},"
            raise UsageError(expected(contract, step, for_="step"))
        return step % count

    def _ran(self) -> list[int]:
        """Return the steps that count for means: those that did not fail, if there are any."""
        good = [step for step, info in enumerate(self.steps) if not info.failed]
        return good or list(range(len(self.steps)))

    def _stalled(self) -> list[list[tuple[float, float]]]:
        """Return for each lane the times when it stood still, in order and without overlaps."""
        found: list[list[tuple[float, float]]] = [[] for _ in self.lanes]
        for event in sorted((e for e in self.events if e.kind == "stall"), key=lambda e: e.start):
            row = found[event.lane]
            if row and event.start <= row[-1][1]:
                row[-1] = row[-1][0], max(row[-1][1], event.end)
            else:
                row.append((event.start, event.end))
        return found


def _net(event: Event, stalls: list[tuple[float, float]]) -> float:
    """Return an action's time without the stalls of its lane in it."""
    took = event.duration
    if stalls:
        at = max(0, bisect_left(stalls, (event.start, event.start)) - 1)
        while at < len(stalls) and stalls[at][0] < event.end:
            start, end = stalls[at]
            took -= max(0.0, min(end, event.end) - max(start, event.start))
            at += 1
    return took


def in_rows(events: Iterable[Event]) -> list[list[Event]]:
    """Return events in the fewest rows in which none overlap."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        row = next((row for row in rows if row[-1].end <= event.start), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def runs(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """Return pairs of actions that follow each other in a micro-batch's run on different hops."""
    paths: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.kind in ("F", "B"):
            paths.setdefault((event.step, event.microbatch), []).append(event)
    found = []
    for path in paths.values():
        path.sort(key=lambda e: (e.start, e.end))
        found += [(a, b) for a, b in pairwise(path) if a.hop != b.hop]
    return found
