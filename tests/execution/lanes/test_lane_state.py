"""The state of a schedule, driven without threads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpipe.execution.lanes.lane_state import LaneState
from blockpipe.schedules import make_schedule
from blockpipe.schedules.schedule import Action, Schedule

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "sequential"]


def F(hop: int, m: int) -> Action:  # noqa: N802 - as an action is printed
    return Action("F", hop, m)


def B(hop: int, m: int) -> Action:  # noqa: N802
    return Action("B", hop, m)


def two_stages(microbatches: int = 2) -> Schedule:
    return make_schedule("gpipe", [0, 1], microbatches)


def test_only_the_first_forward_begins():
    """At first nothing but the first micro-batch's forward can begin, and it begins once."""
    state = LaneState(two_stages())
    assert [state.next_on(lane) for lane in state.begin()] == [F(0, 0), None]
    assert [state.next_on(lane) for lane in state.begin()] == [None, None]


def test_a_run_that_leaves_a_hop_lets_the_next_one_begin():
    """When micro-batch 0 goes on to hop 1, which is free, micro-batch 1 begins on hop 0."""
    state = LaneState(two_stages())
    state.next_on(0)
    state.cross(0, -1, 0)
    assert not state.must_wait(F(0, 0))
    assert set(state.cross(0, 0, 1)) == {0, 1}
    assert not state.must_wait(F(1, 0))
    assert state.next_on(0) == F(0, 1)


def test_a_run_waits_until_its_turn():
    """A run that comes to a hop before those that are first there waits until they are over."""
    state = LaneState(two_stages())
    state.next_on(0)
    state.cross(0, -1, 0)
    state.cross(0, 0, 1)
    state.next_on(0)
    state.cross(1, -1, 0)
    state.cross(1, 0, 1)
    assert state.must_wait(F(1, 1))
    assert state.waiting == {1: 1}
    assert state.moving == {0}
    assert state.next_on(1) is None
    lane, others = state.finish_forward(0)
    assert (lane, others) == (1, [0])
    assert state.next_on(1) == F(1, 1)
    assert state.waiting == {}


def test_a_hop_that_is_skipped_is_passed_over():
    """A run that goes from hop 0 to hop 2 leaves hop 1 to the next micro-batch."""
    state = LaneState(make_schedule("gpipe", [0, 1, 2], 2))
    state.next_on(0)
    state.cross(0, -1, 0)
    assert set(state.cross(0, 0, 2)) == {0, 1, 2}
    state.next_on(0)
    state.cross(1, -1, 0)
    state.cross(1, 0, 1)
    assert state.next_on(1) is None  # nobody waits there; this passes over F1.0
    assert not state.must_wait(F(1, 1))


def test_a_backward_waits_for_the_later_hop():
    """The last hop's backward needs the forward, an earlier hop's the backward after it."""
    state = LaneState(two_stages(1))
    state.next_on(0)
    state.cross(0, -1, 0)
    state.cross(0, 0, 1)
    assert [state.next_on(0), state.next_on(1)] == [None, None]
    assert state.finish_forward(0) == (1, [0])
    assert [state.next_on(0), state.next_on(1)] == [None, B(1, 0)]
    assert state.next_on(1) is None
    assert state.finish_backward(B(1, 0)) == [0]
    assert state.next_on(0) == B(0, 0)
    state.finish_backward(B(0, 0))
    assert state.is_over


def test_after_a_failure_nothing_begins():
    """Nothing begins, nobody waits, and a run that comes to a border does not wait there."""
    state = LaneState(two_stages())
    state.next_on(0)
    state.cross(0, -1, 0)
    state.cross(0, 0, 1)
    state.next_on(0)
    state.cross(1, -1, 0)
    state.cross(1, 0, 1)
    assert state.must_wait(F(1, 1))
    state.stop()
    assert state.waiting == {}
    assert not state.must_wait(F(1, 1))
    state.finish_forward(0)
    assert [state.next_on(lane) for lane in (0, 1)] == [None, None]


def test_after_an_early_failure_nothing_begins():
    """Where a step fails before its first forward begins, that does not begin."""
    state = LaneState(two_stages())
    state.stop()
    assert [state.next_on(lane) for lane in state.begin()] == [None, None]


def test_forwards_alone_begin_in_bounded_numbers():
    """Where forwards run alone, no more of them begin than hops, and one."""
    state = LaneState(make_schedule("gpipe", [0, 1], 8), "F")
    for m in range(3):
        assert state.next_on(0) == F(0, m)
        state.cross(m, -1, 0)
        state.cross(m, 0, 1)
        assert state.must_wait(F(1, m)) == (m > 0)
    assert state.next_on(0) is None
    assert state.finish_forward(0) == (1, [0])
    assert state.next_on(0) == F(0, 3)


# --- any schedule, in any order of events


class Player:
    """Stands in for the threads of a step: runs whatever may begin, in an order that is chosen.

    Args:
        schedule: what is played.
        only: as for the state.
        skips: by micro-batch, the hops that its run does not come to.
        choose: from the actions under way to the index of the one that is over next.
    """

    def __init__(
        self,
        schedule: Schedule,
        only: Literal["F", "B"] | None = None,
        skips: Mapping[int, set[int]] | None = None,
        choose: Callable[[int], int] = lambda count: 0,
    ) -> None:
        self.schedule, self.only, self.skips, self.choose = schedule, only, skips or {}, choose
        self.state = LaneState(schedule, only)
        self.runs: set[int] = set()  # micro-batches whose runs have begun
        self.finished: set[int] = set()  # micro-batches whose forwards are over
        self.under_way: list[Action] = []
        self.played: list[list[Action]] = [[] for _ in schedule.lanes]

    def play(self) -> list[list[Action]]:
        """Run all; returns for each lane its actions in the order in which they were over."""
        self.look_at(self.state.begin())
        while self.under_way:
            action = self.under_way.pop(self.choose(len(self.under_way)))
            self.played[self.lane_of(action)].append(action)
            if action.kind == "F":
                self.go_on(action)
            else:
                self.look_at([*self.state.finish_backward(action), self.lane_of(action)])
        assert self.state.is_over, f"it stands still: {self.state.waiting}"
        return self.played

    def look_at(self, lanes: Iterable[int]) -> None:
        """Begin what may begin on these lanes."""
        for lane in lanes:
            action = self.state.next_on(lane)
            if action is None:
                continue
            if action.kind == "F" and action.microbatch not in self.runs:
                self.runs.add(action.microbatch)
                self.cross(action.microbatch, -1)
            else:
                self.begin(action)

    def begin(self, action: Action) -> None:
        """An action begins: alone on its lane."""
        beside = [a for a in self.under_way if self.lane_of(a) == self.lane_of(action)]
        assert not beside, f"{action} begins while {beside} is under way"
        if action.kind == "B":
            assert self.has_its_gradient(action), f"{action} begins before what it needs"
        self.under_way.append(action)

    def has_its_gradient(self, action: Action) -> bool:
        _, hop, m = action
        if hop + 1 == len(self.schedule.lane_of_hop):
            return self.only == "B" or m in self.finished
        return any(B(hop + 1, m) in lane for lane in self.played)

    def cross(self, m: int, before: int) -> None:
        """A run leaves a hop, for the next one that it does not skip."""
        after = next(hop for hop in self.hops_of(m) if hop > before)
        self.look_at(self.state.cross(m, before, after))
        if not self.state.must_wait(F(after, m)):
            self.begin(F(after, m))

    def go_on(self, action: Action) -> None:
        """A run's forward on a hop is over: it comes to the next, or to its end."""
        if action.hop != self.hops_of(action.microbatch)[-1]:
            self.cross(action.microbatch, action.hop)
            return
        self.finished.add(action.microbatch)
        lane, others = self.state.finish_forward(action.microbatch)
        assert lane == self.lane_of(action)
        assert lane not in others
        self.look_at([*others, lane])

    def lane_of(self, action: Action) -> int:
        return self.schedule.lane_of_hop[action.hop]

    def hops_of(self, m: int) -> list[int]:
        skipped = self.skips.get(m, set())
        return [hop for hop in range(len(self.schedule.lane_of_hop)) if hop not in skipped]


@pytest.mark.parametrize("only", ["F", "B"])
def test_parts_of_a_step(only):
    """Of a schedule the forwards alone are run, or all other actions."""
    schedule = make_schedule("zb-h1", [0, 1], 3)
    played = Player(schedule, only).play()
    wanted = {a for lane in schedule.lanes for a in lane if (a.kind == "F") == (only == "F")}
    assert {action for lane in played for action in lane} == wanted


@st.composite
def schedules(draw):
    """A schedule of a name, with some backwards that recompute before."""
    name = draw(st.sampled_from(SCHEDULES))
    stages = draw(st.integers(1, 4))
    if name == "zb-v":
        lane_of_hop = [*range(stages), *reversed(range(stages))]
    else:
        rounds = draw(st.integers(1, 2)) if name in ("interleaved", "gpipe", "1f1b") else 1
        lane_of_hop = list(range(stages)) * rounds
    schedule = make_schedule(name, lane_of_hop, draw(st.integers(1, 6)))
    if draw(st.booleans()):
        return schedule.with_recomputed(lambda hop, m: (hop + m) % 2 == 0)
    return schedule


@given(schedule=schedules(), only=st.sampled_from([None, "F", "B"]), data=st.data())
def test_any_order_of_events_plays_the_schedule(schedule, only, data):
    """However long actions take, and whichever hops runs skip: each lane runs its actions in the
    schedule's order, one at a time, and none is left out."""
    hops = len(schedule.lane_of_hop)
    skipped = st.sets(st.integers(0, hops - 1), max_size=min(2, hops - 1))
    microbatches = st.integers(0, schedule.microbatches - 1)
    skips = data.draw(st.dictionaries(microbatches, skipped, max_size=3))
    order = data.draw(st.randoms(use_true_random=False))

    def is_meant(action: Action) -> bool:
        if action.kind == "F" and action.hop in skips.get(action.microbatch, set()):
            return False
        return only is None or (action.kind == "F") == (only == "F")

    played = Player(schedule, only, skips, order.randrange).play()
    assert played == [[a for a in lane if is_meant(a)] for lane in schedule.lanes]
