"""Makes the schedules that have a name.

Plain chains have formulas. Everything else comes from one greedy list scheduler that plays the
pipeline out: a route may return to a stage, several stages may share a lane, and no formula holds
then. Under ``"1f1b"`` four hops give the well-known table::

    lane 0: F0 F1 F2 F3 B0 F4 B1 …
    lane 1:    F0 F1 F2 B0 F3 B1 …
    lane 2:       F0 F1 B0 F2 B1 …
    lane 3:          F0 B0 F1 B1 …
"""

import contextlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._common.checks import did_you_mean, expected, is_integer
from ..errors import ScheduleError
from .list_scheduler import ListScheduler, Rules
from .schedule import (
    MICROBATCH_SHIFT,
    MOST_HOPS,
    MOST_MICROBATCHES,
    Actions,
    B,
    F,
    Schedule,
    W,
    pack,
)
from .simulation import Costs, Simulation, simulate

SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")

# A user's schedule: a name, a value, or a function that makes one from the lanes of a route and a
# number of micro-batches.
ScheduleOption = str | Schedule | Callable[[Sequence[int], int], Schedule]


def make_schedule(
    name: str,
    lane_of_hop: Sequence[int],
    microbatches: int,
    *,
    in_flight: int | None = None,
    splits_backward: Sequence[bool] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Make the schedule of a name for a route.

    Args:
        name:
            ``"sequential"``: one micro-batch at a time, for debugging.
            ``"gpipe"``: all forwards, then all backwards.
            ``"1f1b"``: a backward as soon as there is one; hop ``h`` of ``H`` holds at most
            ``H - h`` micro-batches.
            ``"interleaved"``: 1F1B for several hops a lane, micro-batches in groups of as many as
            there are lanes, which shortens the bubble by the number of hops a lane.
            ``"zb-h1"``: 1F1B with the backward in two parts; weight gradients fill the bubble.
            ``"zb-v"``: in two parts too, for two hops a lane, placed as a V (lanes 0 1 1 0).
        lane_of_hop: the lane that each hop of the route runs on.
        microbatches: the number of micro-batches.
        in_flight: the most micro-batches that are under way at once; ``None``: as many as the
            named schedule has.
        splits_backward: for each hop, whether its backward comes in two parts; ``None``: all do.
        costs: the costs with which the scheduler plays the pipeline out; ``None``: F, B and W one
            unit each.

    Raises:
        ScheduleError: the name is unknown, there is no hop or no micro-batch, there are more than
            :data:`MOST_HOPS` or :data:`MOST_MICROBATCHES` of them, or a limit is below 1.

    Source: GPipe (Huang et al., 2019); 1F1B: PipeDream-Flush, interleaved: Megatron-LM (Narayanan
    et al., 2021); zero bubble: Qi et al., 2023 (ZB-H1) and 2024 (ZB-V).

    Example:
        >>> print(make_schedule("1f1b", [0, 1], 3))
        lane 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
        lane 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    if name not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        fix = did_you_mean(name, SCHEDULES, "") if isinstance(name, str) else ""
        raise ScheduleError(expected(f"one of {names}", name, for_="the schedule", fix=fix))
    costs = costs or Costs()
    _check_sizes(lane_of_hop, microbatches)
    _check_lanes(lane_of_hop)
    hops = len(lane_of_hop)
    if splits_backward is not None and len(splits_backward) != hops:
        contract = f"one entry for each of the {hops} hops"
        raise ScheduleError(expected(contract, splits_backward, for_="splits_backward"))
    check_in_flight(in_flight)
    costs.check(hops)
    splits = (True,) * hops if splits_backward is None else tuple(splits_backward)
    return _MAKERS[name](_Order(name, tuple(lane_of_hop), microbatches, in_flight, splits, costs))


def _check_sizes(lane_of_hop: Sequence[int], microbatches: int) -> None:
    hops = len(lane_of_hop)
    if not 1 <= hops <= MOST_HOPS:
        contract = f"between 1 and {MOST_HOPS:,} hops"
        raise ScheduleError(expected(contract, hops, for_="lane_of_hop"))
    if not is_integer(microbatches, 1) or microbatches > MOST_MICROBATCHES:
        contract = f"an integer from 1 to {MOST_MICROBATCHES:,}"
        raise ScheduleError(expected(contract, microbatches, for_="microbatches"))


def _check_lanes(lane_of_hop: Sequence[int]) -> None:
    lanes = set(lane_of_hop)
    if lanes != set(range(len(lanes))):
        contract = "lanes numbered 0, 1, … without gaps"
        raise ScheduleError(expected(contract, tuple(lane_of_hop), for_="lane_of_hop"))


def check_in_flight(in_flight: object) -> None:
    """Raise :class:`ScheduleError` unless it is a positive integer or ``None``."""
    if in_flight is not None and not is_integer(in_flight, 1):
        raise ScheduleError(expected("a positive integer or None", in_flight, for_="in_flight"))


def cuts_graphs(schedule: ScheduleOption) -> bool:
    """Return whether a step under a schedule cuts the graph between the stages."""
    return schedule != "uncut"


@dataclass(frozen=True)
class _Order:
    """The checked arguments of :func:`make_schedule`, and what follows from them."""

    name: str
    lane_of_hop: tuple[int, ...]
    microbatches: int
    in_flight: int | None
    splits: tuple[bool, ...]
    costs: Costs

    @property
    def hops(self) -> int:
        return len(self.lane_of_hop)

    @property
    def lanes(self) -> int:
        return max(self.lane_of_hop) + 1

    @property
    def is_chain(self) -> bool:
        """Whether every hop has a lane of its own."""
        return self.lanes == self.hops

    def of(self, rows: Sequence["array[int]"]) -> Schedule:
        """Return the schedule with these packed actions, for each lane."""
        return Schedule(self.name, self.lane_of_hop, self.microbatches, tuple(map(Actions, rows)))

    def by_rules(self, rules: Rules, *, splits: bool = False) -> Schedule:
        """Return the list scheduler's schedule; its backwards are whole unless ``splits``."""
        split = self.splits if splits else (False,) * self.hops
        scheduler = ListScheduler(self.lane_of_hop, self.microbatches, rules, split, self.costs)
        return scheduler.schedule(self.name)


def _sequential(order: _Order) -> Schedule:
    return order.by_rules(Rules(1))


def _gpipe(order: _Order) -> Schedule:
    if order.in_flight is not None and order.in_flight < order.microbatches:
        return order.by_rules(Rules(order.in_flight, forward_first=True))
    rows = [array("q") for _ in range(order.lanes)]
    hops, microbatches = order.hops, order.microbatches
    if order.is_chain:
        for hop, lane in enumerate(order.lane_of_hop):
            rows[lane] = _run(F, hop, 0, microbatches) + _run(B, hop, 0, microbatches)
        return order.of(rows)
    # Clock cycles: at clock t, hop h runs micro-batch t - h; backwards run them mirrored.
    for clock in range(hops + microbatches - 1):
        for hop in range(hops):
            if 0 <= clock - hop < microbatches:
                rows[order.lane_of_hop[hop]].append(pack(F, hop, clock - hop))
    for clock in range(hops + microbatches - 1):
        for hop in reversed(range(hops)):
            microbatch = clock - (hops - 1 - hop)
            if 0 <= microbatch < microbatches:
                rows[order.lane_of_hop[hop]].append(pack(B, hop, microbatch))
    return order.of(rows)


def _one_f_one_b(order: _Order) -> Schedule:
    limit, microbatches = order.in_flight or order.hops, order.microbatches
    if not order.is_chain:
        return order.by_rules(Rules(limit, tapers=True))
    rows = [array("q") for _ in range(order.lanes)]
    for hop, lane in enumerate(order.lane_of_hop):
        warm = min(microbatches, max(1, limit - hop))
        pairs = array("q", bytes(16 * (microbatches - warm)))
        pairs[0::2] = _run(B, hop, 0, microbatches - warm)
        pairs[1::2] = _run(F, hop, warm, microbatches)
        rest = _run(B, hop, microbatches - warm, microbatches)
        rows[lane] = _run(F, hop, 0, warm) + pairs + rest
    return order.of(rows)


def _zero_bubble(order: _Order) -> Schedule:
    """Return ZB-H1 for a chain: hop ``h`` begins as under 1F1B, and its weight parts stay ``h``
    micro-batches behind its backwards, so that every hop keeps as many as the first."""
    if not order.is_chain:
        return order.by_rules(Rules(order.in_flight or order.lanes), splits=True)
    limit, microbatches = order.in_flight or order.hops, order.microbatches
    rows = [array("q") for _ in range(order.lanes)]
    for hop, lane in enumerate(order.lane_of_hop):
        splits = order.splits[hop]
        warm = min(microbatches, max(1, limit - hop))
        behind = min(hop, limit - 1)
        row = _run(F, hop, 0, warm)
        for m in range(microbatches):
            row.append(pack(B, hop, m))
            if splits and m >= behind:
                row.append(pack(W, hop, m - behind))
            if m + warm < microbatches:
                row.append(pack(F, hop, m + warm))
        if splits:
            row += _run(W, hop, max(0, microbatches - behind), microbatches)
        rows[lane] = row
    return order.of(rows)


def _run(kind: int, hop: int, begin: int, end: int) -> "array[int]":
    """Return the actions of one kind and hop for consecutive micro-batches."""
    step = 1 << MICROBATCH_SHIFT
    first = pack(kind, hop, begin)
    return array("q", range(first, first + (end - begin) * step, step))


def _interleaved(order: _Order) -> Schedule:
    """Return Megatron's formula where it holds; elsewhere the shortest of it and some greedy
    schedules."""
    lanes, in_flight = order.lanes, order.in_flight
    visits = order.hops // lanes
    found: list[Schedule] = []
    if order.lane_of_hop == tuple(range(lanes)) * visits:
        formula = _looped(order)
        fits = in_flight is None or formula.in_flight() <= in_flight
        if fits and order.microbatches % lanes == 0:
            return formula
        with contextlib.suppress(ScheduleError):  # with a smaller last group it may deadlock
            simulate(formula)
            found = [formula] if fits else []
    most = min(in_flight or 2 * lanes, order.microbatches)
    for limit in sorted({min(lanes, most), min(3 * lanes // 2, most), most}):
        for group in (lanes, 0):
            found.append(order.by_rules(Rules(limit, group=group)))
    return min(found, key=lambda schedule: simulate(schedule, order.costs).makespan)


def _looped(order: _Order) -> Schedule:
    """Return Megatron's interleaved schedule. Forwards go in groups of as many micro-batches as
    there are lanes, visit by visit; lane ``l`` of ``L`` begins with
    ``(visits - 1) L + 2 (L - l - 1)`` of them, then alternates."""
    lanes = order.lanes
    visits = range(order.hops // lanes)
    every = [(visit, m) for visit in visits for m in range(order.microbatches)]
    forwards = sorted(every, key=lambda e: (e[1] // lanes, e[0], e[1]))
    backwards = sorted(every, key=lambda e: (e[1] // lanes, -e[0], e[1]))
    rows = []
    for lane in range(lanes):
        warm = min(len(every), (len(visits) - 1) * lanes + 2 * (lanes - lane - 1))
        row = array("q", (pack(F, v * lanes + lane, m) for v, m in forwards[:warm]))
        for at, (visit, m) in enumerate(backwards):
            if at + warm < len(forwards):
                later, other = forwards[at + warm]
                row.append(pack(F, later * lanes + lane, other))
            row.append(pack(B, visit * lanes + lane, m))
        rows.append(row)
    return order.of(rows)


_MAKERS: dict[str, Callable[[_Order], Schedule]] = {
    "sequential": _sequential,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
    "zb-v": _zero_bubble,
}


# --- by simulation


@dataclass(frozen=True)
class ScheduleChoice:
    """The result of ``schedule="auto"``: every candidate played out, the best first."""

    candidates: tuple[Simulation, ...]

    @property
    def schedule(self) -> Schedule:
        """The best schedule."""
        return self.candidates[0].schedule

    def __str__(self) -> str:
        best = self.candidates[0]
        others = ", ".join(
            f"{s.schedule.name} {s.makespan / (best.makespan or 1):.2f} × its time"
            + (f" and {max(s.peak) / (max(best.peak) or 1):.2g} × its memory" if best.peak else "")
            for s in self.candidates[1:]
        )
        return (
            f"{best.schedule.name}: {100 * best.bubble:.0f} % bubble predicted "
            f"({others or 'nothing else to try'})"
        )


def choose(
    lane_of_hop: Sequence[int],
    microbatches: int,
    costs: Costs,
    *,
    in_flight: int | None = None,
    splits_backward: Sequence[bool] | None = None,
    recomputes: Callable[[int, int], bool] | None = None,
) -> ScheduleChoice:
    """Choose the schedule that is predicted to be the fastest; of those within 2 %, the one that
    keeps the least.

    Args:
        lane_of_hop: as for :func:`make_schedule`.
        microbatches: the number of micro-batches.
        costs: the costs of each hop.
        in_flight: as for :func:`make_schedule`.
        splits_backward: as for :func:`make_schedule`.
        recomputes: ``(hop, microbatch) -> bool``: whether a backward has an R before it; ``None``:
            none has.

    Example:
        >>> choose([0, 1, 2, 3], 8, Costs()).schedule.name
        'zb-h1'
    """
    shared = len(set(lane_of_hop)) < len(lane_of_hop)
    names = ["1f1b", "gpipe"] + (["interleaved"] if shared else [])
    if splits_backward is None or any(splits_backward):
        names += ["zb-v"] if shared else ["zb-h1"]
    made = [
        make_schedule(
            n,
            lane_of_hop,
            microbatches,
            in_flight=in_flight,
            splits_backward=splits_backward,
            costs=costs,
        )
        for n in names
    ]
    if recomputes is not None:
        made = [schedule.with_recomputed(recomputes) for schedule in made]
    tried = [simulate(schedule, costs) for schedule in made]
    shortest = min(s.makespan for s in tried)

    def rank(s: Simulation) -> tuple[bool, float, float]:
        is_slow = s.makespan > 1.02 * shortest
        return is_slow, s.makespan if is_slow else max(s.peak), s.makespan

    return ScheduleChoice(tuple(sorted(tried, key=rank)))
