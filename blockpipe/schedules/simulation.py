"""A schedule played out: how long it takes, what idles, what is kept, and whether it can run.

Each lane runs its actions in order, each as soon as its inputs are there: the time is a number that
is added up, action by action, in one pass. A simulation in ticks would have to round the costs.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._common.checks import expected
from ..errors import ScheduleError
from .schedule import (
    KINDS,
    MICROBATCH_SHIFT,
    Action,
    B,
    F,
    R,
    Schedule,
    W,
    fields_of,
    most_kept,
    pack,
    unpack,
)

PerHop = float | Sequence[float]

_ROW = (1 << MICROBATCH_SHIFT) - 1  # of a packed action, its kind and hop


class HopCosts(NamedTuple):
    """The :class:`Costs` of one hop."""

    forward: float
    backward: float
    weight: float
    transfer: float
    activation: float
    recompute: float
    dropped: float


@dataclass(frozen=True)
class Costs:
    """The costs of the actions: a number for all hops, or one for each.

    Args:
        forward: time of an F, in any unit.
        backward: time of a whole B. In two parts, B takes ``backward - weight``.
        weight: time of a W.
        transfer: time from a hop's end until the next hop, on another lane, has its output; the
            same for the way back. Copies do not wait for each other.
        activation: size of the activations that a hop keeps of one micro-batch from its F to the
            end of its backward, in any unit (bytes, or 1 to count them).
        recompute: time of an R; ``None``: a forward's.
        dropped: the part of ``activation`` that a micro-batch with an R does not keep from its F
            to its R.

    Example:
        >>> Costs(forward=[1.0, 2.0], backward=[2.0, 4.0]).of(1)
        (2.0, 4.0, 1.0)
    """

    forward: PerHop = 1.0
    backward: PerHop = 2.0
    weight: PerHop = 1.0
    transfer: PerHop = 0.0
    activation: PerHop = 1.0
    recompute: PerHop | None = None
    dropped: PerHop = 0.0

    def of(self, hop: int) -> tuple[float, float, float]:
        """Return a hop's forward, whole backward and weight part."""
        return self.on(hop)[:3]

    def on(self, hop: int) -> HopCosts:
        """Return all costs of a hop, as numbers."""
        values = [getattr(self, name) for name in HopCosts._fields]
        values = [self.forward if value is None else value for value in values]
        return HopCosts(*(float(v if isinstance(v, int | float) else v[hop]) for v in values))

    def check(self, hops: int) -> None:
        """Check the costs.

        Args:
            hops: the number of hops.

        Raises:
            ScheduleError: a cost is neither a number nor has one for each hop, is negative or
                infinite, or the weight part of a backward costs more than the whole.
        """
        for name in HopCosts._fields:
            value = getattr(self, name)
            if value is not None or name != "recompute":
                _check_cost(name, value, hops)
        for hop in range(hops):
            _, backward, weight = self.of(hop)
            if weight > backward:
                raise ScheduleError(
                    expected(
                        f"a part of the backward's {backward}",
                        weight,
                        for_=f"the weight of hop {hop}",
                        fix="pass the time of a whole B, including its W, as backward",
                    )
                )


def _check_cost(name: str, value: object, hops: int) -> None:
    contract = f"a number, or one for each of {hops} hops,"
    if isinstance(value, int | float):
        numbers: Sequence[object] = [value]
    elif not isinstance(value, Sequence) or isinstance(value, str):
        raise ScheduleError(expected(contract, value, for_=name))
    elif len(value) != hops:
        raise ScheduleError(expected(contract, value, for_=name, fix=f"it has {len(value)}"))
    else:
        numbers = value
    if not all(isinstance(n, int | float) and 0 <= n < float("inf") for n in numbers):
        raise ScheduleError(expected("finite times or sizes from 0 on", value, for_=name))


@dataclass(frozen=True)
class Simulation:
    """The result of playing a schedule out.

    Attributes:
        schedule: the schedule that was played out.
        makespan: from the first action's start to the last one's end, in the costs' unit.
        bubble: the share of all lanes' time in which they idle, 0 to 1.
        busy: for each lane, the time for which it works.
        peak: for each lane, the most activations that it keeps at once, in the unit of
            ``Costs.activation``.
        starts: for each lane, the time at which each of its actions starts.

    Example:
        >>> from blockpipe.schedules import make_schedule, simulate
        >>> found = simulate(make_schedule("gpipe", [0, 1], 2))
        >>> found.makespan, round(found.bubble, 3), found.peak
        (9.0, 0.333, [2.0, 2.0])
    """

    schedule: Schedule
    makespan: float
    bubble: float
    busy: list[float]
    peak: list[float]
    starts: "list[array[float]]" = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"{self.schedule.name}: {self.makespan:g} long, {100 * self.bubble:.1f} % bubble",
            "lane      busy    idle      peak",
        ]
        lines += [
            f"{lane:>4}  {busy:>8.4g}  {1 - busy / (self.makespan or 1):>5.1%}  {peak:>8.4g}"
            for lane, (busy, peak) in enumerate(zip(self.busy, self.peak, strict=True))
        ]
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Play a schedule out.

    Args:
        schedule: the actions of every lane.
        costs: the costs of the actions; ``None``: F, B and W one unit each, a whole B two.

    Returns:
        A :class:`Simulation`.

    Raises:
        ScheduleError: an action can never run, is missing or is listed twice; or the costs do not
            fit.

    Example:
        >>> from blockpipe.schedules import make_schedule
        >>> result = simulate(make_schedule("1f1b", [0, 1, 2, 3], 8))
        >>> result.makespan, f"{result.bubble:.3f}", result.peak  # (p - 1) / (m + p - 1)
        (33.0, '0.273', [4.0, 3.0, 2.0, 1.0])
    """
    costs = costs or Costs()
    _check_arguments(schedule, costs)
    hops = [costs.on(hop) for hop in range(len(schedule.lane_of_hop))]
    playback = _Playback(schedule, hops, _check_each_once(schedule))
    playback.run()
    playback.check_all_ran()
    makespan = max(playback.now)
    lane_time = len(schedule.lanes) * makespan
    # The sum over a lane may round to more than its end.
    bubble = max(0.0, 1 - sum(playback.busy) / lane_time) if makespan else 0.0
    size, dropped = [hop.activation for hop in hops], [hop.dropped for hop in hops]
    peak = [most_kept(codes, size, dropped) for codes in schedule.codes]
    return Simulation(schedule, makespan, bubble, playback.busy, peak, playback.starts)


def _check_arguments(schedule: Schedule, costs: Costs) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(expected("a Schedule", schedule, for_="schedule"))
    if not isinstance(costs, Costs):
        raise ScheduleError(expected("Costs", costs, for_="costs"))
    hops, lanes = len(schedule.lane_of_hop), len(schedule.lanes)
    costs.check(hops)
    if not hops or schedule.microbatches < 1:
        contract = f"at least one hop and one micro-batch in schedule {schedule.name!r}"
        raise ScheduleError(expected(contract, (hops, schedule.microbatches)))
    if any(not 0 <= lane < lanes for lane in schedule.lane_of_hop):
        contract = f"lanes from 0 to {lanes - 1}, for which schedule {schedule.name!r} has actions,"
        raise ScheduleError(expected(contract, list(schedule.lane_of_hop), for_="lane_of_hop"))


class _Playback:
    """A schedule while it is played out.

    An action has an index, by which its end is found: ``first[row] + microbatch``, where ``row``
    is the packed kind and hop. It needs the action whose index is larger by ``needs[row]``: an F
    that of the hop before, a B that of the hop behind (on the last hop its own F), a W its B, an R
    its F. Then it waits for ``delay[row]``, the transfer, and takes ``took[row]``. The F of the
    first hop need the indices from ``-microbatches`` to -1: the end of ``finish``, where all is 0.

    Args:
        schedule: the schedule, in which each action is listed once.
        hops: the costs of each hop.
        listed: 1 at the index of each action that the schedule has.

    Attributes:
        position: for each lane, the entry that runs next.
        now: for each lane, the end of its last action.
        busy: for each lane, the time for which it has worked.
        starts: for each lane, the start of each of its actions.
    """

    def __init__(self, schedule: Schedule, hops: list[HopCosts], listed: bytearray) -> None:
        self.schedule = schedule
        count, lane_of = schedule.microbatches, schedule.lane_of_hop
        self.total = total = len(hops) * count
        split = listed[W * total : R * total]
        self.split = split if any(split) else bytearray()
        self.first: list[int] = []
        self.needs: list[int] = []
        self.delay: list[float] = []
        self.took: list[float] = []
        arrives = 0.0  # of the hop before
        last = len(hops) - 1
        for hop, cost in enumerate(hops):
            leaves = cost.transfer if hop < last and lane_of[hop] != lane_of[hop + 1] else 0.0
            self.first += [kind * total + hop * count for kind in (F, B, W, R)]
            self.needs += [-count, count if hop < last else -total, -total, -3 * total]
            self.delay += [arrives, leaves, 0.0, 0.0]
            self.took += [cost.forward, cost.backward, cost.weight, cost.recompute]
            arrives = leaves
        self.finish = array("d", [-1.0]) * (listed.rfind(1) + 1) + array("d", bytes(8 * count))
        lanes = schedule.codes
        self.position = [0] * len(lanes)
        self.now, self.busy = [0.0] * len(lanes), [0.0] * len(lanes)
        self.starts = [array("d", bytes(8 * len(codes))) for codes in lanes]

    def run(self) -> None:
        """Play every lane out, as far as it can run."""
        lanes, split, total, finish = self.schedule.codes, self.split, self.total, self.finish
        first, needs, delay, took = self.first, self.needs, self.delay, self.took
        waiting: dict[int, int] = {}  # from a missing action to the lane that waits for it
        runnable = list(range(len(lanes)))[::-1]
        while runnable:
            lane = runnable.pop()
            codes, starts = lanes[lane], self.starts[lane]
            at, time, work = self.position[lane], self.now[lane], self.busy[lane]
            while at < len(codes):
                code = codes[at]
                row = code & _ROW
                this = first[row] + (code >> MICROBATCH_SHIFT)
                ready = finish[this + needs[row]]
                if ready < 0:
                    waiting[this + needs[row]] = lane
                    break
                ready += delay[row]
                start = ready if ready > time else time
                duration = took[row]
                if split and code & 3 == B and split[this - total]:
                    duration -= took[row - B + W]
                starts[at] = start
                time = start + duration
                finish[this] = time
                work += duration
                at += 1
                if this in waiting:
                    runnable.append(waiting.pop(this))
            self.position[lane], self.now[lane], self.busy[lane] = at, time, work

    def check_all_ran(self) -> None:
        """Raise :class:`ScheduleError` if a lane has not come to its end."""
        lanes = self.schedule.codes
        stuck = [lane for lane, codes in enumerate(lanes) if self.position[lane] < len(codes)]
        if not stuck:
            return
        # All lanes of a circle of waits are stuck: the one that waits for itself began it.
        lane_of = self.schedule.lane_of_hop
        own = (lane for lane in stuck if lane_of[self._missing(lane).hop] == lane)
        lane = next(own, stuck[0])
        entry = self.position[lane]
        raise ScheduleError(
            f"schedule {self.schedule.name!r} deadlocks: lane {lane}, entry {entry} "
            f"({unpack(lanes[lane][entry])}) needs {self._missing(lane)}, which never runs before "
            "it; put it before the action that needs it"
        )

    def _missing(self, lane: int) -> Action:
        """Return the action that a stuck lane's next action needs: the nearest that has not run."""
        code = self.schedule.codes[lane][self.position[lane]]
        this = self.first[code & _ROW] + (code >> MICROBATCH_SHIFT)
        need = this + self.needs[code & _ROW]
        if code & 3 == B and self.finish[this - self.total] < 0:
            need = this - self.total
        return _action(need, self.schedule)


def _action(index: int, schedule: Schedule) -> Action:
    """Return the action of an index that counts kinds, then hops, then micro-batches."""
    kind, rest = divmod(index, len(schedule.lane_of_hop) * schedule.microbatches)
    return Action(KINDS[kind], *divmod(rest, schedule.microbatches))


def _check_each_once(schedule: Schedule) -> bytearray:
    """Check that every hop and micro-batch has one F, one B, and at most one W and one R, all on
    the hop's lane.

    Returns:
        A 1 at the index (see :func:`_action`) of each action that the schedule has.
    """
    hops, count = len(schedule.lane_of_hop), schedule.microbatches
    total = hops * count
    name = f"schedule {schedule.name!r}"
    _check_enough(schedule)
    listed = bytearray(4 * total)
    for lane, codes in enumerate(schedule.codes):
        for kind, hop, m in fields_of(codes):
            if hop >= hops or m >= count:
                raise ScheduleError(
                    f"{name} has {Action(KINDS[kind], hop, m)} on lane {lane}, but only {hops} "
                    f"hops and {count} micro-batches, counted from 0"
                )
            action = kind * total + hop * count + m
            if schedule.lane_of_hop[hop] != lane:
                raise ScheduleError(
                    f"{name} has {_action(action, schedule)} on lane {lane}, but its lane_of_hop "
                    f"puts hop {hop} on lane {schedule.lane_of_hop[hop]}"
                )
            if listed[action]:
                raise ScheduleError(f"{name} has {_action(action, schedule)} twice")
            if kind == R and listed[action - R * total + B * total]:
                raise ScheduleError(
                    f"{name} has {_action(action, schedule)} after its backward, which needs the "
                    "recomputed activations; put it before"
                )
            listed[action] = 1
    missing = listed.find(0, 0, 2 * total)
    if missing >= 0:
        raise _missing_action(schedule, missing)
    return listed


def _check_enough(schedule: Schedule) -> None:
    """Raise for fewer actions than an F and a B of each: memory is allocated for the actions that
    are there, and not for the ones that the numbers promise."""
    hops, count = len(schedule.lane_of_hop), schedule.microbatches
    if sum(map(len, schedule.codes)) < 2 * hops * count:
        there = {code for lane in schedule.codes for code in lane}
        every = range(2 * hops * count)
        missing = next(index for index in every if _code(index, schedule) not in there)
        raise _missing_action(schedule, missing)


def _code(index: int, schedule: Schedule) -> int:
    kind, hop, m = _action(index, schedule)
    return pack(KINDS.index(kind), hop, m)


def _missing_action(schedule: Schedule, index: int) -> ScheduleError:
    return ScheduleError(
        f"schedule {schedule.name!r} has no {_action(index, schedule)}; give every hop one F and "
        "one B of each micro-batch"
    )


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run, and runs the micro-batches of each hop in order.

    The order matters on a hop: gradients are added up in it, and buffers are written in it.

    Raises:
        ScheduleError: the first action that is missing, is listed twice, can never run, or is out
            of order; the message names it.

    Example:
        >>> from blockpipe.schedules import make_schedule
        >>> validate(make_schedule("gpipe", [0, 1, 2], 4))
    """
    simulate(schedule)
    split = schedule.split()
    for lane in schedule.codes:
        newest: dict[tuple[int, int], int] = {}
        for kind, hop, m in fields_of(lane):
            orders = [(kind, hop)]
            if kind == B and (hop, m) not in split:
                orders.append((W, hop))  # a whole backward adds to the gradients, as a W does
            for order in orders:
                if m < newest.get(order, 0):
                    raise ScheduleError(
                        f"schedule {schedule.name!r} has {Action(KINDS[kind], hop, m)} after that "
                        "of a later micro-batch; order the micro-batches of a hop as the plain "
                        "loop does"
                    )
                newest[order] = m
