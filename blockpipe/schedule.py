"""Schedules as data: for each lane, the order of its actions.

A schedule is a plain value, one list of actions for each lane, so that a test can write one out
and a person can print one. All kinds come from one greedy list scheduler that plays the pipeline
out with unit costs: the known formulas hold for plain chains only, and a route may return to a
stage. For a chain of four hops under ``"1f1b"`` it gives the well-known table::

    lane 0: F0 F1 F2 F3 B0 F4 B1 …
    lane 1:    F0 F1 F2 B0 F3 B1 …
    lane 2:       F0 F1 B0 F2 B1 …
    lane 3:          F0 B0 F1 B1 …
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .errors import ScheduleError

Kind = Literal["F", "B"]
SCHEDULES = ("sequential", "gpipe", "1f1b")


class Action(NamedTuple):
    """One entry of a schedule: forward or backward of one micro-batch on one hop."""

    kind: Kind
    hop: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.hop}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every lane does, in order; ``lane_of_hop[h]`` is the lane of hop ``h``."""

    name: str
    lane_of_hop: tuple[int, ...]
    microbatches: int
    lanes: tuple[tuple[Action, ...], ...]

    def in_flight(self) -> int:
        """The most micro-batches that are under way at once: begun, and not back at the start."""
        begun = most = 0
        for action in self.lanes[self.lane_of_hop[0]]:
            if action.hop == 0:
                begun += 1 if action.kind == "F" else -1
                most = max(most, begun)
        return most

    def __str__(self) -> str:
        return "\n".join(
            f"lane {lane}: " + " ".join(map(str, actions))
            for lane, actions in enumerate(self.lanes)
        )


def make_schedule(name: str, lane_of_hop: Sequence[int], microbatches: int) -> Schedule:
    """The schedule of that name over a route.

    Args:
        name: ``"sequential"`` (one micro-batch at a time: for debugging), ``"gpipe"`` (all
            forwards, then all backwards) or ``"1f1b"`` (a backward as soon as there is one; at
            most as many micro-batches in flight as there are hops).
        lane_of_hop: the lane that each hop of the route runs on.
        microbatches: how many there are.

    Raises:
        ScheduleError: an unknown name, no hop, or no micro-batch.

    Source: GPipe (Huang et al., 2019); 1F1B: PipeDream-Flush (Narayanan et al., 2021).

    Example:
        >>> print(make_schedule("1f1b", [0, 1], 3))
        lane 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
        lane 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """
    if not lane_of_hop or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs a hop and a micro-batch, but {len(lane_of_hop)} hops and "
            f"{microbatches} micro-batches came"
        )
    if name == "sequential":
        return gpipe_or_less(name, lane_of_hop, microbatches, limit=1)
    if name == "gpipe":
        return gpipe(lane_of_hop, microbatches)
    if name == "1f1b":
        return one_f_one_b(lane_of_hop, microbatches)
    raise ScheduleError(
        f"a schedule is one of {', '.join(map(repr, SCHEDULES))}, but {name!r} came"
    )


def gpipe(lane_of_hop: Sequence[int], microbatches: int) -> Schedule:
    """All forwards, then all backwards, in micro-batch order on every lane."""
    hops = range(len(lane_of_hop))
    lanes = range(max(lane_of_hop) + 1)
    forward: list[list[Action]] = [[] for _ in lanes]
    backward: list[list[Action]] = [[] for _ in lanes]
    # Clock cycles: at clock t, hop h runs micro-batch t - h; backwards run them mirrored.
    for clock in range(len(lane_of_hop) + microbatches - 1):
        for hop in hops:
            if 0 <= clock - hop < microbatches:
                forward[lane_of_hop[hop]].append(Action("F", hop, clock - hop))
        for hop in reversed(hops):
            microbatch = clock - (len(lane_of_hop) - 1 - hop)
            if 0 <= microbatch < microbatches:
                backward[lane_of_hop[hop]].append(Action("B", hop, microbatch))
    return Schedule(
        "gpipe",
        tuple(lane_of_hop),
        microbatches,
        tuple((*f, *b) for f, b in zip(forward, backward, strict=True)),
    )


def one_f_one_b(lane_of_hop: Sequence[int], microbatches: int) -> Schedule:
    """A backward as soon as there is one; hop ``h`` of ``H`` holds at most ``H - h`` in flight."""
    return gpipe_or_less("1f1b", lane_of_hop, microbatches, limit=len(lane_of_hop))


def gpipe_or_less(name: str, lane_of_hop: Sequence[int], microbatches: int, limit: int) -> Schedule:
    """Greedy list scheduling: backward first, lowest micro-batch first, ``limit`` in flight.

    Time runs in unit steps. At each, every lane takes the best action whose inputs were ready
    before the step; hop ``h`` begins no forward while ``max(1, limit - h)`` are between their
    forward and their backward there, which is what bounds the memory.
    """
    hops = len(lane_of_hop)
    lanes: list[list[Action]] = [[] for _ in range(max(lane_of_hop) + 1)]
    next_forward = [0] * hops  # the next micro-batch of each hop; order is kept on every hop
    next_backward = [0] * hops
    remaining = 2 * hops * microbatches
    while remaining:
        forwards, backwards = list(next_forward), list(next_backward)  # as before this step
        taken: dict[int, Action] = {}
        for hop in range(hops):
            lane = lane_of_hop[hop]
            microbatch = backwards[hop]
            done_forward = forwards[hop] > microbatch
            done_after = hop == hops - 1 or backwards[hop + 1] > microbatch
            if microbatch < microbatches and done_forward and done_after:
                _offer(taken, lane, Action("B", hop, microbatch))
            microbatch = forwards[hop]
            arrived = hop == 0 or forwards[hop - 1] > microbatch
            in_flight = microbatch - backwards[hop]
            room = in_flight < max(1, limit - hop)
            if microbatch < microbatches and arrived and room:
                _offer(taken, lane, Action("F", hop, microbatch))
        for lane, action in taken.items():
            lanes[lane].append(action)
            ahead = next_forward if action.kind == "F" else next_backward
            ahead[action.hop] += 1
        remaining -= len(taken)
    return Schedule(name, tuple(lane_of_hop), microbatches, tuple(map(tuple, lanes)))


def _offer(taken: dict[int, Action], lane: int, action: Action) -> None:
    def rank(a: Action) -> tuple[bool, int, int]:
        return a.kind == "F", a.microbatch, -a.hop

    if lane not in taken or rank(action) < rank(taken[lane]):
        taken[lane] = action


def validate(schedule: Schedule) -> None:
    """Play a schedule out; an error names the first action that can never run.

    Raises:
        ScheduleError: an action is missing, is there twice, or comes before what it needs.

    Example:
        >>> validate(make_schedule("gpipe", [0, 1, 2], 4))
    """
    hops = len(schedule.lane_of_hop)
    wanted = {
        Action(kind, hop, m)
        for kind in ("F", "B")
        for hop in range(hops)
        for m in range(schedule.microbatches)
    }
    every = [action for lane in schedule.lanes for action in lane]
    if len(every) != len(wanted) or set(every) != wanted:
        odd = sorted(wanted.symmetric_difference(every)) or sorted(
            a for a in wanted if every.count(a) > 1
        )
        raise ScheduleError(
            f"every action runs once, but {odd[0]} is missing, double or unknown in {schedule.name}"
        )
    done: set[Action] = set()
    position = [0] * len(schedule.lanes)
    moved = True
    while moved:
        moved = False
        for lane, actions in enumerate(schedule.lanes):
            while position[lane] < len(actions) and _needs(actions[position[lane]], hops) <= done:
                done.add(actions[position[lane]])
                position[lane] += 1
                moved = True
    for lane, actions in enumerate(schedule.lanes):
        if position[lane] < len(actions):
            action = actions[position[lane]]
            missing = sorted(_needs(action, hops) - done)[0]
            raise ScheduleError(
                f"lane {lane} of {schedule.name} comes to {action} (entry {position[lane]}) which "
                f"needs {missing}, and that never runs before it"
            )


def _needs(action: Action, hops: int) -> set[Action]:
    kind, hop, m = action
    if kind == "F":
        return {Action("F", hop - 1, m)} if hop else set()
    after = Action("B", hop + 1, m) if hop + 1 < hops else Action("F", hop, m)
    return {after, Action("F", hop, m)}
