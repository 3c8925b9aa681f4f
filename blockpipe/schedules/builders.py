"""Makes the schedules that have a name.

Plain chains have formulas. All else comes from one greedy list scheduler that plays the pipeline
out: a route may return to a stage, several stages may share a lane, and no formula holds then.
Under ``"1f1b"`` four hops give the well-known table::

    lane 0: F0 F1 F2 F3 B0 F4 B1 …
    lane 1:    F0 F1 F2 B0 F3 B1 …
    lane 2:       F0 F1 B0 F2 B1 …
    lane 3:          F0 B0 F1 B1 …
"""

import contextlib
import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ScheduleError
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

# What a user gives for a schedule: a name, one of their own, or what makes one for a route's lanes
# and a number of micro-batches.
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
    """The schedule of that name over a route.

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
        microbatches: how many there are.
        in_flight: at most so many micro-batches are under way at once; ``None``: what the name
            says.
        separable: for each hop, whether its backward comes in two parts; ``None``: all.
        costs: what the scheduler plays out with; ``None``: F, B and W one unit each.

    Raises:
        ScheduleError: an unknown name, no hop, no micro-batch, more than :data:`MOST_HOPS` or
            :data:`MOST_MICROBATCHES` of them, or a limit below 1.

    Source: GPipe (Huang et al., 2019); 1F1B: PipeDream-Flush, interleaved: Megatron-LM (Narayanan
    et al., 2021); zero bubble: Qi et al., 2023 (ZB-H1) and 2024 (ZB-V).

    Example:
        >>> print(make_schedule("1f1b", [0, 1], 3))
        lane 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
        lane 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    hops = len(lane_of_hop)
    if not hops or not isinstance(microbatches, int) or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs a hop and a micro-batch, but {hops} hops and "
            f"{microbatches} micro-batches came"
        )
    if hops > MOST_HOPS or microbatches > MOST_MICROBATCHES:
        raise ScheduleError(
            f"a schedule has {MOST_HOPS:,} hops and {MOST_MICROBATCHES:,} micro-batches at the "
            f"most, but {hops:,} and {microbatches:,} came"
        )
    lane_of_hop = tuple(lane_of_hop)
    if set(lane_of_hop) != set(range(len(set(lane_of_hop)))):
        raise ScheduleError(f"lanes are numbered 0, 1, … without gaps, but {lane_of_hop} came")
    if splits_backward is not None and len(splits_backward) != hops:
        raise ScheduleError(
            f"separable has one entry for each of {hops} hops, not {splits_backward!r}"
        )
    check_in_flight(in_flight)
    is_chain = len(set(lane_of_hop)) == hops
    costs = costs or Costs()
    costs.check(hops)
    whole = [False] * hops
    if name == "sequential":
        return _greedy(name, lane_of_hop, microbatches, _Rules(1), whole, costs)
    if name == "gpipe":
        if in_flight is None or in_flight >= microbatches:
            return _gpipe(lane_of_hop, microbatches)
        rules = _Rules(in_flight, forward_first=True)
        return _greedy(name, lane_of_hop, microbatches, rules, whole, costs)
    if name == "1f1b":
        limit = in_flight or hops
        if is_chain:
            return _one_f_one_b(lane_of_hop, microbatches, limit)
        rules = _Rules(limit, tapers=True)
        return _greedy(name, lane_of_hop, microbatches, rules, whole, costs)
    if name == "interleaved":
        return _interleaved(lane_of_hop, microbatches, in_flight, costs)
    if name in ("zb-h1", "zb-v"):
        split = list(splits_backward) if splits_backward is not None else [True] * hops
        if is_chain:
            return _zero_bubble(name, lane_of_hop, microbatches, in_flight or hops, split)
        rules = _Rules(in_flight or max(lane_of_hop) + 1)
        return _greedy(name, lane_of_hop, microbatches, rules, split, costs)
    raise ScheduleError(
        f"a schedule is one of {', '.join(map(repr, SCHEDULES))}, but {name!r} came"
    )


def check_in_flight(in_flight: object) -> None:
    """Raise :class:`ScheduleError` for what is no limit."""
    if in_flight is None:
        return
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
        raise ScheduleError(
            f"in_flight is a number of micro-batches from 1 on, or None, but {in_flight!r} came"
        )


# --- the formulas


def _gpipe(lane_of_hop: tuple[int, ...], microbatches: int) -> Schedule:
    hops = len(lane_of_hop)
    lanes = [array("q") for _ in range(max(lane_of_hop) + 1)]
    if len(set(lane_of_hop)) == hops:
        for hop, lane in enumerate(lane_of_hop):
            lanes[lane] = _run(F, hop, 0, microbatches) + _run(B, hop, 0, microbatches)
        return Schedule("gpipe", lane_of_hop, microbatches, tuple(map(Actions, lanes)))
    # Clock cycles: at clock t, hop h runs micro-batch t - h; backwards run them mirrored.
    for clock in range(hops + microbatches - 1):
        for hop in range(hops):
            if 0 <= clock - hop < microbatches:
                lanes[lane_of_hop[hop]].append(pack(F, hop, clock - hop))
    for clock in range(hops + microbatches - 1):
        for hop in reversed(range(hops)):
            microbatch = clock - (hops - 1 - hop)
            if 0 <= microbatch < microbatches:
                lanes[lane_of_hop[hop]].append(pack(B, hop, microbatch))
    return Schedule("gpipe", lane_of_hop, microbatches, tuple(map(Actions, lanes)))


def _one_f_one_b(lane_of_hop: tuple[int, ...], microbatches: int, limit: int) -> Schedule:
    lanes = [array("q") for _ in lane_of_hop]
    for hop, lane in enumerate(lane_of_hop):
        warm = min(microbatches, max(1, limit - hop))
        pairs = array("q", bytes(16 * (microbatches - warm)))
        pairs[0::2] = _run(B, hop, 0, microbatches - warm)
        pairs[1::2] = _run(F, hop, warm, microbatches)
        rest = _run(B, hop, microbatches - warm, microbatches)
        lanes[lane] = _run(F, hop, 0, warm) + pairs + rest
    return Schedule("1f1b", lane_of_hop, microbatches, tuple(map(Actions, lanes)))


def _zero_bubble(
    name: str, lane_of_hop: tuple[int, ...], microbatches: int, limit: int, split: list[bool]
) -> Schedule:
    """ZB-H1: hop ``h`` begins as under 1F1B, and its weight parts stay ``h`` micro-batches behind
    its backwards: so as many are kept on every hop as on the first."""
    lanes = [array("q") for _ in lane_of_hop]
    for hop, lane in enumerate(lane_of_hop):
        warm = min(microbatches, max(1, limit - hop))
        behind = min(hop, limit - 1)
        row = _run(F, hop, 0, warm)
        for m in range(microbatches):
            row.append(pack(B, hop, m))
            if split[hop] and m >= behind:
                row.append(pack(W, hop, m - behind))
            if m + warm < microbatches:
                row.append(pack(F, hop, m + warm))
        if split[hop]:
            row += _run(W, hop, max(0, microbatches - behind), microbatches)
        lanes[lane] = row
    return Schedule(name, lane_of_hop, microbatches, tuple(map(Actions, lanes)))


def _run(kind: int, hop: int, begin: int, end: int) -> "array[int]":
    """The actions of one kind and hop for consecutive micro-batches."""
    step = 1 << MICROBATCH_SHIFT
    first = pack(kind, hop, begin)
    return array("q", range(first, first + (end - begin) * step, step))


# --- the list scheduler


@dataclass(frozen=True)
class _Rules:
    """What the greedy scheduler may do, and what it likes better.

    Attributes:
        limit: micro-batches under way at once.
        tapers: hop ``h`` holds ``limit - h`` between forward and backward: what bounds the
            memory of the later hops.
        forward_first: rather a forward than a backward.
        group: forwards go in groups of so many micro-batches, hop by hop; 0: the lowest
            micro-batch first.
    """

    limit: int
    tapers: bool = False
    forward_first: bool = False
    group: int = 0


def _interleaved(
    lane_of_hop: tuple[int, ...], microbatches: int, in_flight: int | None, costs: Costs
) -> Schedule:
    """By Megatron's formula where it holds; elsewhere the shortest of it and some greedy ones."""
    lanes = len(set(lane_of_hop))
    visits = len(lane_of_hop) // lanes
    looped = lane_of_hop == tuple(range(lanes)) * visits
    found: list[Schedule] = []
    if looped:
        formula = _looped(lane_of_hop, microbatches, lanes)
        fits = in_flight is None or formula.in_flight() <= in_flight
        if fits and microbatches % lanes == 0:
            return formula
        with contextlib.suppress(ScheduleError):  # a smaller last group may not come out
            simulate(formula)
            found = [formula] if fits else []
    most = min(in_flight or 2 * lanes, microbatches)
    whole = [False] * len(lane_of_hop)
    for limit in sorted({min(lanes, most), min(3 * lanes // 2, most), most}):
        for group in (lanes, 0):
            rules = _Rules(limit, group=group)
            found.append(_greedy("interleaved", lane_of_hop, microbatches, rules, whole, costs))
    return min(found, key=lambda schedule: simulate(schedule, costs).makespan)


def _looped(lane_of_hop: tuple[int, ...], microbatches: int, lanes: int) -> Schedule:
    """Forwards go in groups of as many micro-batches as there are lanes, visit by visit; lane
    ``l`` of ``L`` begins with ``(visits - 1) L + 2 (L - l - 1)`` of them, then alternates."""
    visits = range(len(lane_of_hop) // lanes)
    every = [(visit, m) for visit in visits for m in range(microbatches)]
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
        rows.append(Actions(row))
    return Schedule("interleaved", lane_of_hop, microbatches, tuple(rows))


def _greedy(
    name: str,
    lane_of_hop: tuple[int, ...],
    microbatches: int,
    rules: _Rules,
    split: Sequence[bool],
    costs: Costs,
) -> Schedule:
    """Greedy list scheduling: a free lane takes the best action whose inputs are there.

    Backwards before forwards, lowest micro-batch first; a weight part only when nothing else can
    run. Every hop takes micro-batches in order, so what is done is a count for each hop.
    """
    hops = len(lane_of_hop)
    lanes = [array("q") for _ in range(max(lane_of_hop) + 1)]
    hops_of = [[h for h in range(hops) if lane_of_hop[h] == lane] for lane in range(len(lanes))]
    begun = [[0] * hops for _ in range(3)]
    done = [[0] * hops for _ in range(3)]
    freed = [done[W] if split[h] else done[B] for h in range(hops)]
    took = [costs.of(hop) for hop in range(hops)]
    idle = [True] * len(lanes)

    def has_room(hop: int) -> bool:
        m = begun[F][hop]
        if hop == 0 and m - freed[0][0] >= rules.limit:
            return False
        if not rules.tapers:
            return True
        held = m - done[B][hop]
        return held < max(1, rules.limit - hop) and m - freed[hop][hop] < rules.limit

    def can_run(kind: int, hop: int) -> bool:
        m = begun[kind][hop]
        if m >= microbatches:
            return False
        if kind == F:
            return (hop == 0 or done[F][hop - 1] > m) and has_room(hop)
        if kind == B:
            return done[F][hop] > m and (hop == hops - 1 or done[B][hop + 1] > m)
        return split[hop] and done[B][hop] > m

    def rank(kind: int, hop: int) -> tuple[int, ...]:
        m = begun[kind][hop]
        order = (F, B, W) if rules.forward_first else (B, F, W)
        first = order.index(kind)
        if kind == F and rules.group:
            return first, m // rules.group, hop, m
        return first, m, -hop

    events: list[tuple[float, int, int, int]] = []

    def start(lane: int, now: float) -> None:
        offers = [(k, h) for h in hops_of[lane] for k in (F, B, W) if can_run(k, h)]
        if not offers:
            return
        kind, hop = min(offers, key=lambda offer: rank(*offer))
        lanes[lane].append(pack(kind, hop, begun[kind][hop]))
        begun[kind][hop] += 1
        idle[lane] = False
        duration = took[hop][kind]
        if kind == B and split[hop]:
            duration -= took[hop][W]
        heapq.heappush(events, (now + duration, lane, kind, hop))

    start(lane_of_hop[0], 0.0)
    while events:
        now = events[0][0]
        woken: set[int] = set()
        while events and events[0][0] <= now:
            _, lane, kind, hop = heapq.heappop(events)
            done[kind][hop] += 1
            idle[lane] = True
            woken.add(lane)
            after = hop + 1 if kind == F else hop - 1
            if kind != W and 0 <= after < hops:
                woken.add(lane_of_hop[after])
        for lane in sorted(woken):
            if idle[lane]:
                start(lane, now)
    return Schedule(name, lane_of_hop, microbatches, tuple(map(Actions, lanes)))


# --- by simulation


@dataclass(frozen=True)
class ScheduleChoice:
    """What ``schedule="auto"`` found: every candidate played out, the best first."""

    candidates: tuple[Simulation, ...]

    @property
    def schedule(self) -> Schedule:
        """The best."""
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
    """The schedule that is predicted to be the fastest; of equals (2 %), what keeps the least.

    Args:
        lane_of_hop: as for :func:`make_schedule`.
        microbatches: how many there are.
        costs: what each hop costs.
        in_flight: as for :func:`make_schedule`.
        separable: as for :func:`make_schedule`.
        restores: ``(hop, microbatch) -> bool``: what has an R before its backward.

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
