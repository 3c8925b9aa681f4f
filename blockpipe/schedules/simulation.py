"""A schedule played out: how long it takes, what idles, what is kept, and whether it can run.

Each lane runs its actions in order, each as soon as what it needs is there: time is a number that
is added up, action by action, in one pass. A simulation in ticks would have to round the costs.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ScheduleError
from .schedule import HOP_MASK, HOP_SHIFT, MICROBATCH_SHIFT, B, F, R, Schedule, W, pack, unpack

PerHop = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What the actions cost: a number for all hops, or one for each.

    Args:
        forward: time of an F, in any unit.
        backward: time of a whole B. In two parts, B takes ``backward - weight``.
        weight: time of a W.
        transfer: time from a hop's end until the next hop, on another lane, has its output; and
            back. Copies do not wait for each other.
        activation: what a hop keeps of one micro-batch from its F to the end of its backward, in
            any unit (bytes, or 1 to count them).
        restore: time of an R; ``None``: a forward's.
        dropped: of ``activation``, what is not kept from the F to the R of what has an R.

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
        """A hop's forward, whole backward and weight part."""
        return _at(self.forward, hop), _at(self.backward, hop), _at(self.weight, hop)

    def check(self, hops: int) -> None:
        """Raise :class:`ScheduleError` for a list that has not one number for each hop, or a
        negative number."""
        for name in COSTS:
            value = getattr(self, name)
            if value is None and name == "recompute":
                continue
            is_one = isinstance(value, int | float)
            if not is_one and (not isinstance(value, Sequence) or isinstance(value, str)):
                raise ScheduleError(
                    f"{name} is a number, or a list with one for each hop, but {value!r} came"
                )
            numbers = [value] if is_one else list(value)
            if not is_one and len(numbers) != hops:
                raise ScheduleError(
                    f"{name} is a number, or one for each of {hops} hops, but {len(numbers)} came"
                )
            if any(not isinstance(n, int | float) or not 0 <= n < float("inf") for n in numbers):
                raise ScheduleError(f"{name} is times or sizes from 0 on, but {value!r} came")
        for hop in range(hops):
            _, backward, weight = self.of(hop)
            if weight > backward:
                raise ScheduleError(
                    f"weight is a part of backward, but on hop {hop} they are {weight} and "
                    f"{backward}; backward is the time of a whole B, W included"
                )


COSTS = ("forward", "backward", "weight", "transfer", "activation", "recompute", "dropped")


def _at(value: PerHop, hop: int) -> float:
    return float(value) if isinstance(value, int | float) else float(value[hop])


@dataclass(frozen=True)
class Simulation:
    """What playing a schedule out came to.

    Attributes:
        makespan: from the first action's start to the last one's end, in the costs' unit.
        bubble: the share of all lanes' time in which they idle, 0 to 1.
        busy: for each lane, how long it works.
        peak: for each lane, the most that it keeps of activations at once.
        starts: for each lane, when each of its actions starts.
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
        schedule: what every lane does.
        costs: what the actions take; ``None``: F, B and W one unit each, a whole B two.

    Returns:
        A :class:`Simulation`.

    Raises:
        ScheduleError: an action can never run, is missing or is there twice; or the costs do not
            fit.

    Example:
        >>> from blockpipe.schedules import make_schedule
        >>> result = simulate(make_schedule("1f1b", [0, 1, 2, 3], 8))
        >>> result.makespan, f"{result.bubble:.3f}", result.peak  # (p - 1) / (m + p - 1)
        (33.0, '0.273', [4.0, 3.0, 2.0, 1.0])
    """
    costs = costs or Costs()
    if not isinstance(schedule, Schedule) or not isinstance(costs, Costs):
        raise ScheduleError(
            f"simulate takes a Schedule and Costs, but {type(schedule).__name__} and "
            f"{type(costs).__name__} came"
        )
    hops, count = len(schedule.lane_of_hop), schedule.microbatches
    costs.check(hops)
    lane_of, lanes = schedule.lane_of_hop, schedule.codes
    if not hops or count < 1 or any(not 0 <= lane < len(lanes) for lane in lane_of):
        raise ScheduleError(
            f"a schedule needs a hop, a micro-batch and a lane for each hop, but {hops} hops, "
            f"{count} micro-batches and lanes {list(lane_of)} of {len(lanes)} came"
        )
    total = hops * count
    split, recomputed = _check_each_once(schedule)
    finish = array("d", [-1.0]) * (3 * total if split else 2 * total)
    duration = [costs.of(hop) for hop in range(hops)]
    activation = [_at(costs.activation, hop) for hop in range(hops)]
    dropped = [_at(costs.dropped, hop) for hop in range(hops)]
    repeated = costs.forward if costs.recompute is None else costs.recompute
    recompute = [_at(repeated, hop) for hop in range(hops)]
    arrives = [
        _at(costs.transfer, hop) if hop + 1 < hops and lane_of[hop] != lane_of[hop + 1] else 0.0
        for hop in range(hops)
    ]
    starts = [array("d", bytes(8 * len(codes))) for codes in lanes]
    busy, peak = [0.0] * len(lanes), [0.0] * len(lanes)
    kept, now, position = [0.0] * len(lanes), [0.0] * len(lanes), [0] * len(lanes)
    waiting: dict[int, int] = {}  # from what is missing to the lane that waits for it
    runnable = list(range(len(lanes)))[::-1]
    last = hops - 1
    while runnable:
        lane = runnable.pop()
        codes, begun = lanes[lane], starts[lane]
        at, time, work, holds = position[lane], now[lane], busy[lane], kept[lane]
        while at < len(codes):
            code = codes[at]
            kind, hop, m = code & 3, code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT
            this = kind * total + hop * count + m
            if kind == F:
                need = this - count if hop else -1
                ready = finish[need] + arrives[hop - 1] if hop else 0.0
                took = duration[hop][0]
            elif kind == B:
                need = this + count if hop < last else this - total
                ready = finish[need] + (arrives[hop] if hop < last else 0.0)
                if finish[this - total] < 0:
                    need = this - total
                took = duration[hop][1]
                if split and split[hop * count + m]:
                    took -= duration[hop][2]
            else:
                need = (B if kind == W else F) * total + hop * count + m
                ready = finish[need]
                took = duration[hop][2] if kind == W else recompute[hop]
            if need >= 0 and finish[need] < 0:
                waiting[need] = lane
                break
            start = ready if ready > time else time
            begun[at] = start
            time = start + took
            if kind != R:
                finish[this] = time
            work += took
            at += 1
            if kind in (F, R):
                if kind == R:
                    holds += dropped[hop]
                else:
                    holds += activation[hop]
                    if recomputed and recomputed[hop * count + m]:
                        holds -= dropped[hop]
                if holds > peak[lane]:
                    peak[lane] = holds
            elif kind == W or not split or not split[hop * count + m]:
                holds -= activation[hop]
            if this in waiting:
                runnable.append(waiting.pop(this))
        position[lane], now[lane], busy[lane], kept[lane] = at, time, work, holds
    _check_all_ran(schedule, position, finish)
    makespan = max(now)
    # What one lane adds up to may round to more than its end.
    idle = max(0.0, 1 - sum(busy) / (len(lanes) * makespan)) if makespan else 0.0
    return Simulation(schedule, makespan, idle, busy, peak, starts)


def _check_each_once(schedule: Schedule) -> tuple[bytearray, bytearray]:
    """Every hop and micro-batch has one F, one B, at most one W and one R, on its own lane.

    Returns:
        Where ``hop * microbatches + microbatch`` has a W, and where an R; empty if none has.
    """
    hops, count = len(schedule.lane_of_hop), schedule.microbatches
    total = hops * count
    _check_enough(schedule)
    seen = bytearray(4 * total)
    for lane, codes in enumerate(schedule.codes):
        for code in codes:
            hop, m = code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT
            if hop >= hops or m >= count:
                raise ScheduleError(
                    f"{unpack(code)} on lane {lane} of {schedule.name} is not known: there are "
                    f"{hops} hops and {count} micro-batches, counted from 0"
                )
            if schedule.lane_of_hop[hop] != lane:
                raise ScheduleError(
                    f"{unpack(code)} is on lane {lane} of {schedule.name}, but hop {hop} runs on "
                    f"lane {schedule.lane_of_hop[hop]}"
                )
            this = (code & 3) * total + hop * count + m
            if seen[this]:
                raise ScheduleError(f"{unpack(code)} is there twice in {schedule.name}")
            if code & 3 == R and seen[B * total + hop * count + m]:
                raise ScheduleError(
                    f"{unpack(code)} comes after its backward in {schedule.name}; it makes what "
                    "that needs"
                )
            seen[this] = 1
    missing = seen.find(0, 0, 2 * total)
    if missing >= 0:
        kind, rest = divmod(missing, total)
        raise ScheduleError(
            f"{'FB'[kind]}{rest // count}.{rest % count} is missing in {schedule.name}"
        )
    weights, recomputed = seen[2 * total : 3 * total], seen[3 * total :]
    return weights if any(weights) else bytearray(), recomputed if any(recomputed) else bytearray()


def _check_enough(schedule: Schedule) -> None:
    """Raise for fewer actions than an F and a B of each: memory is for what is there, and not for
    what the numbers say."""
    hops, count = len(schedule.lane_of_hop), schedule.microbatches
    if sum(map(len, schedule.codes)) < 2 * hops * count:
        there = {code for lane in schedule.codes for code in lane}
        every = ((k, hop, m) for k in (F, B) for hop in range(hops) for m in range(count))
        missing = next(action for action in every if pack(*action) not in there)
        raise ScheduleError(f"{unpack(pack(*missing))} is missing in {schedule.name}")


def _check_all_ran(schedule: Schedule, position: list[int], finish: "array[float]") -> None:
    stuck = [lane for lane, codes in enumerate(schedule.codes) if position[lane] < len(codes)]
    if not stuck:
        return
    total = len(schedule.lane_of_hop) * schedule.microbatches

    def missing(lane: int) -> int:
        """What the lane's next action needs: the nearest thing that has not run."""
        kind, hop, m = unpack(schedule.codes[lane][position[lane]])
        this = hop * schedule.microbatches + m
        if kind == "F":
            return this - schedule.microbatches
        if kind == "W":
            return total + this
        if kind == "R":
            return this
        last = hop == len(schedule.lane_of_hop) - 1
        return this if last or finish[this] < 0 else total + this + schedule.microbatches

    def lane_of(index: int) -> int:
        return schedule.lane_of_hop[index % total // schedule.microbatches]

    # Lanes that wait for each other all look stuck: one that waits for itself is where it began.
    lane = next((lane for lane in stuck if lane_of(missing(lane)) == lane), stuck[0])
    index = missing(lane)
    kind, rest = divmod(index, total)
    need = f"{'FB'[kind]}{rest // schedule.microbatches}.{rest % schedule.microbatches}"
    raise ScheduleError(
        f"lane {lane} of {schedule.name} comes to {schedule.lanes[lane][position[lane]]} (entry "
        f"{position[lane]}) which needs {need}, and that never runs before it"
    )


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run, and runs the micro-batches of each hop in order.

    Order matters on a hop: gradients add up in it, and buffers are written in it.

    Raises:
        ScheduleError: names the first action that is missing, is there twice, can never run, or
            is out of order.

    Example:
        >>> from blockpipe.schedules import make_schedule
        >>> validate(make_schedule("gpipe", [0, 1, 2], 4))
    """
    simulate(schedule)
    split = schedule.split()
    for lane in schedule.codes:
        newest: dict[tuple[int, int], int] = {}
        for code in lane:
            kind, hop, m = code & 3, code >> HOP_SHIFT & HOP_MASK, code >> MICROBATCH_SHIFT
            orders = [(kind, hop)]
            if kind == B and (hop, m) not in split:
                orders.append((W, hop))  # a whole backward adds to the gradients, as a W does
            for order in orders:
                if m < newest.get(order, 0):
                    raise ScheduleError(
                        f"{unpack(code)} of {schedule.name} comes after a later micro-batch's; a "
                        "hop takes micro-batches in order, as the plain loop does"
                    )
                newest[order] = m
