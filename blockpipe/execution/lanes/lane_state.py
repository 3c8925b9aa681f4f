"""How far a step is: which action may begin next on each lane. No threads, no locks, no torch.

A lane's actions begin in the schedule's order, one at a time:

- A forward F(hop, m) may begin when it is the first action left on its lane and the run of
  micro-batch m has come to that hop. For hop 0 the run begins with it.
- A backward B(hop, m) needs B(hop + 1, m), if there is such a hop.
- All else that an action needs comes before it on its own lane.

A run goes from hop to hop by itself, and may skip some: their forwards are passed over. Whoever
runs the step reports what happens (:meth:`LaneState.cross`, :meth:`LaneState.finish_forward`,
:meth:`LaneState.finish_backward`), which returns the lanes where something may begin now, and asks
:meth:`LaneState.next_on` for each of them.
"""

from collections.abc import Iterable
from typing import Literal

from ...schedules.schedule import Action, Actions, Schedule


class LaneState:
    """The state of one step's schedule.

    Args:
        schedule: the order of actions on every lane.
        only: ``"F"`` runs the forwards alone, ``"B"`` all other actions; ``None`` runs all.
    """

    def __init__(self, schedule: Schedule, only: Literal["F", "B"] | None = None) -> None:
        self.lane_of_hop = schedule.lane_of_hop
        self.lanes = len(schedule.lanes)
        self.is_stopped = False
        self._only = only
        self._actions = [lane.unpacked() for lane in schedule.lanes if isinstance(lane, Actions)]
        self._position = [0] * self.lanes  # of the first action left
        self._in_backward = [False] * self.lanes  # whether one is under way
        self._skipped: set[Action] = set()  # forwards that their runs do not come to
        self._waiting: set[Action] = set()  # forwards whose runs have come, and wait
        self._hop_of_run: dict[int, int] = {}  # by micro-batch: where its run is, -1 at first
        self._finished: set[int] = set()  # micro-batches whose forward is over
        self._done: set[Action] = set()  # backwards
        if only == "B":
            self._finished.update(range(schedule.microbatches))

    # --- what may begin

    def next_on(self, lane: int) -> Action | None:
        """Return the action that begins on a lane now; from then on it has begun.

        A forward that begins on hop 0 needs a run of its own unless one has come to it
        (:meth:`must_wait`); any other forward is one whose run waits for it.
        """
        head = self._head(lane)
        if head is None or self.is_stopped:
            return None
        if head.kind != "F":
            if self._in_backward[lane] or not self._has_its_gradient(head):
                return None
            self._in_backward[lane] = True
            return head
        if head in self._waiting:
            self._waiting.discard(head)
            return head
        if head.hop == 0 and head.microbatch not in self._hop_of_run and self._may_start():
            self._hop_of_run[head.microbatch] = -1
            return head
        return None

    def _head(self, lane: int) -> Action | None:
        """The first action left on a lane, after those that are passed over."""
        actions, position = self._actions[lane], self._position[lane]
        if self._skipped or self._only is not None:
            while position < len(actions) and self._is_passed_over(actions[position]):
                position += 1
            self._position[lane] = position
        return actions[position] if position < len(actions) else None

    def _is_passed_over(self, action: Action) -> bool:
        if action in self._skipped:
            return True
        return self._only is not None and (action.kind == "F") != (self._only == "F")

    def _may_start(self) -> bool:
        """Whether another run may start.

        Each takes a thread until its forward is over. Where forwards run alone nothing else bounds
        them, and more of them than hops would only wait.
        """
        under_way = len(self._hop_of_run) - len(self._finished)
        return self._only != "F" or under_way <= len(self.lane_of_hop)

    def _has_its_gradient(self, action: Action) -> bool:
        """Whether a backward has what it needs from other lanes."""
        kind, hop, m = action
        if kind != "B" or hop + 1 == len(self.lane_of_hop):
            return True  # what it needs is its own lane's, and comes before it there
        return Action("B", hop + 1, m) in self._done

    # --- what has happened

    def begin(self) -> Iterable[int]:
        """Return the lanes where something may begin at first: all of them."""
        return range(self.lanes)

    def cross(self, microbatch: int, before: int, after: int) -> list[int]:
        """A run has left one hop (``-1``: it has just begun) and comes to another.

        Returns:
            The lanes where something may begin now.
        """
        self._hop_of_run[microbatch] = after
        lanes = self._leave(microbatch, before, after)
        if before >= 0:
            lanes.append(self.lane_of_hop[before])
        lanes.append(self.lane_of_hop[after])  # passes over forwards that this run skips
        return lanes

    def must_wait(self, turn: Action) -> bool:
        """Whether a run that has come to a hop waits there, until :meth:`next_on` returns its turn.

        Args:
            turn: the forward on that hop.
        """
        if self.is_stopped or self._is_head(turn):
            return False
        self._waiting.add(turn)
        return True

    def _is_head(self, action: Action) -> bool:
        lane = self.lane_of_hop[action.hop]
        position = self._position[lane]
        return position < len(self._actions[lane]) and self._actions[lane][position] == action

    def finish_forward(self, microbatch: int) -> tuple[int, list[int]]:
        """A run's forward is over.

        Returns:
            The lane that it was on, and the other lanes where something may begin now.
        """
        hop = self._hop_of_run[microbatch]
        lane = self.lane_of_hop[max(hop, 0)]
        self._finished.add(microbatch)
        lanes = self._leave(microbatch, hop, len(self.lane_of_hop))
        # On the first a run may have waited for a thread, on the last a backward for this forward.
        lanes += (self.lane_of_hop[0], self.lane_of_hop[-1])
        return lane, [other for other in dict.fromkeys(lanes) if other != lane]

    def _leave(self, microbatch: int, before: int, after: int) -> list[int]:
        """A run is done with a hop, and skips those up to the next; returns their lanes."""
        if before >= 0:
            self._position[self.lane_of_hop[before]] += 1
        skipped = range(before + 1, after)
        self._skipped.update(Action("F", hop, microbatch) for hop in skipped)
        return [self.lane_of_hop[hop] for hop in skipped]

    def finish_backward(self, action: Action) -> list[int]:
        """A backward, or a recomputation, is over.

        Returns:
            The other lanes where something may begin now.
        """
        hop = action.hop
        lane = self.lane_of_hop[hop]
        self._done.add(action)
        self._position[lane] += 1
        self._in_backward[lane] = False
        if hop and self.lane_of_hop[hop - 1] != lane:
            return [self.lane_of_hop[hop - 1]]
        return []

    def stop(self) -> None:
        """The step has failed: nothing more begins, and nobody waits any more."""
        self.is_stopped = True
        self._waiting.clear()

    # --- for messages and tests

    @property
    def waiting(self) -> dict[int, int]:
        """From each micro-batch whose run waits for its turn to the hop that it waits for."""
        return {turn.microbatch: turn.hop for turn in self._waiting}

    @property
    def moving(self) -> set[int]:
        """The micro-batches whose forwards are under way and do not wait for a turn."""
        return self._hop_of_run.keys() - self.waiting.keys() - self._finished

    @property
    def is_over(self) -> bool:
        """Whether no lane has an action left."""
        return all(self._head(lane) is None for lane in range(self.lanes))
