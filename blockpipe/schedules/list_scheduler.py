"""Greedy list scheduling, for the routes and limits that no formula covers.

The pipeline is played out: a lane that is free takes the best action whose inputs are there. So it
holds for any route: one that returns to a stage, or several stages on one lane.
"""

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Actions, B, F, Schedule, W, pack
from .simulation import Costs


@dataclass(frozen=True)
class Rules:
    """The actions that the list scheduler may take, and those that it prefers.

    Attributes:
        limit: the most micro-batches under way at once.
        tapers: whether hop ``h`` holds at most ``limit - h`` micro-batches between forward and
            backward, which bounds the memory of the later hops.
        forward_first: whether a forward is preferred to a backward.
        group: the size of the groups of micro-batches in which forwards go, hop by hop; 0: the
            lowest micro-batch first.
    """

    limit: int
    tapers: bool = False
    forward_first: bool = False
    group: int = 0


class ListScheduler:
    """Plays a pipeline out and notes the actions that each lane takes.

    Backwards go before forwards, the lowest micro-batch first; a weight part only when nothing
    else can run. Every hop takes micro-batches in order, so its progress is a count for each kind.

    Args:
        lane_of_hop: the lane of each hop.
        microbatches: the number of micro-batches.
        rules: the order and the limits.
        splits_backward: for each hop, whether its backward comes in two parts.
        costs: the durations of the actions.
    """

    def __init__(
        self,
        lane_of_hop: tuple[int, ...],
        microbatches: int,
        rules: Rules,
        splits_backward: Sequence[bool],
        costs: Costs,
    ) -> None:
        hops = len(lane_of_hop)
        self._lane_of_hop = lane_of_hop
        self._last = hops - 1
        self._microbatches = microbatches
        self._rules = rules
        self._splits = splits_backward
        self._durations = [
            (forward, backward - weight if split else backward, weight)
            for split, (forward, backward, weight) in zip(
                splits_backward, map(costs.of, range(hops)), strict=True
            )
        ]
        self._begun = [[0] * hops for _ in (F, B, W)]
        self._done = [[0] * hops for _ in (F, B, W)]
        # What frees a micro-batch's activations on a hop: the end of its backward.
        self._freed = [self._done[W] if split else self._done[B] for split in splits_backward]
        self._lanes = [array("q") for _ in range(max(lane_of_hop) + 1)]
        self._hops_of: list[list[int]] = [[] for _ in self._lanes]
        for hop, lane in enumerate(lane_of_hop):
            self._hops_of[lane].append(hop)
        self._idle = [True] * len(self._lanes)
        self._order = (0, 1, 2) if rules.forward_first else (1, 0, 2)  # rank of F, B, W
        self._events: list[tuple[float, int, int, int]] = []  # ends: time, lane, kind, hop

    def schedule(self, name: str) -> Schedule:
        """Return the schedule, under this name."""
        self._start(self._lane_of_hop[0], 0.0)
        while self._events:
            now = self._events[0][0]
            for lane in sorted(self._ended(now)):
                if self._idle[lane]:
                    self._start(lane, now)
        lanes = tuple(map(Actions, self._lanes))
        return Schedule(name, self._lane_of_hop, self._microbatches, lanes)

    def _ended(self, now: float) -> set[int]:
        """Note the actions that have ended by now; returns the lanes that may go on for it."""
        woken: set[int] = set()
        while self._events and self._events[0][0] <= now:
            _, lane, kind, hop = heapq.heappop(self._events)
            self._done[kind][hop] += 1
            self._idle[lane] = True
            woken.add(lane)
            after = hop + 1 if kind == F else hop - 1
            if kind != W and 0 <= after <= self._last:
                woken.add(self._lane_of_hop[after])
        return woken

    def _start(self, lane: int, now: float) -> None:
        """Begin the best action that the lane can run now, if there is one."""
        offers = [
            (kind, hop)
            for hop in self._hops_of[lane]
            for kind in (F, B, W)
            if self._can_run(kind, hop)
        ]
        if not offers:
            return
        kind, hop = min(offers, key=lambda offer: self._rank(*offer))
        self._lanes[lane].append(pack(kind, hop, self._begun[kind][hop]))
        self._begun[kind][hop] += 1
        self._idle[lane] = False
        heapq.heappush(self._events, (now + self._durations[hop][kind], lane, kind, hop))

    def _can_run(self, kind: int, hop: int) -> bool:
        """Return whether the inputs of a hop's next action of a kind are there."""
        m, done = self._begun[kind][hop], self._done
        if m >= self._microbatches:
            return False
        if kind == F:
            return (hop == 0 or done[F][hop - 1] > m) and self._has_room(hop)
        if kind == B:
            return done[F][hop] > m and (hop == self._last or done[B][hop + 1] > m)
        return self._splits[hop] and done[B][hop] > m

    def _has_room(self, hop: int) -> bool:
        """Return whether one more micro-batch on a hop keeps to the limits."""
        m, rules = self._begun[F][hop], self._rules
        if hop == 0 and m - self._freed[0][0] >= rules.limit:
            return False
        if not rules.tapers:
            return True
        held = m - self._done[B][hop]
        return held < max(1, rules.limit - hop) and m - self._freed[hop][hop] < rules.limit

    def _rank(self, kind: int, hop: int) -> tuple[int, ...]:
        """Return the key by which the best of several actions is the least."""
        m, rank = self._begun[kind][hop], self._order[kind]
        if kind == F and self._rules.group:
            return rank, m // self._rules.group, hop, m
        return rank, m, -hop
