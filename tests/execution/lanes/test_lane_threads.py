"""Threads of lanes by themselves: who runs when, with actions that only note that they ran."""

import contextlib
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpipe._common.threads.thread_state import CallerState
from blockpipe.execution.lanes.lane_threads import Cross, LaneThreads
from blockpipe.schedules.builders import make_schedule
from blockpipe.schedules.schedule import Action, Schedule

from ...schedules.test_schedule import names, routes
from ...stage_devices import examples


class Played:
    """Plays a schedule on lanes, and notes what ran on which lane.

    Args:
        schedule: what to play.
        skips: hops that a micro-batch's forward passes over.
        on: called at each action.
        queued: whether the lanes' devices are asynchronous.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        skips: frozenset[tuple[int, int]] = frozenset(),
        on: Callable[[Action], object] = lambda action: None,
        queued: bool = False,
        only: str | None = None,
    ) -> None:
        self.lane_of, self.skips, self.on = schedule.lane_of_hop, skips, on
        self.lanes: list[list[Action]] = [[] for _ in schedule.lanes]
        self.begun: list[Action] = []  # on all lanes
        self.threads = LaneThreads(
            schedule,
            self._forward,
            self._run,
            CallerState().for_threads(),
            queued=[queued] * len(schedule.lanes),
            threads=1,
            only=only,
        )

    def run(self) -> "Played":
        self.threads.run()
        return self

    def _forward(self, microbatch: int, cross: Cross) -> None:
        before = -1
        for hop in range(len(self.lane_of)):
            if (hop, microbatch) not in self.skips:
                cross(microbatch, before, hop)
                self._run(Action("F", hop, microbatch))
                before = hop

    def _run(self, action: Action) -> None:
        self.lanes[self.lane_of[action.hop]].append(action)
        self.begun.append(action)
        self.on(action)


@settings(max_examples=examples(100))
@given(names, routes, st.integers(1, 6), st.data())
def test_each_lane_runs_its_actions_in_the_schedules_order(name, route, microbatches, data):
    """Whatever hops forwards skip: what is left of a lane is in order, each action once."""
    schedule = make_schedule(name, route, microbatches)
    hops = st.tuples(st.integers(1, len(route)), st.integers(0, microbatches - 1))
    skips = frozenset(data.draw(st.sets(hops, max_size=4))) if len(route) > 1 else frozenset()
    played = Played(schedule, skips=skips).run()
    assert played.lanes == [
        [a for a in lane if a.kind != "F" or (a.hop, a.microbatch) not in skips]
        for lane in schedule.lanes
    ]


@settings(max_examples=examples(100))
@given(names, routes, st.integers(1, 6))
def test_a_backward_begins_after_that_of_the_next_hop(name, route, microbatches):
    """And the last hop's after the whole forward, whatever lanes they are on."""
    begun = Played(make_schedule(name, route, microbatches)).run().begun
    at = {action: position for position, action in enumerate(begun)}
    for kind, hop, microbatch in begun:
        if kind == "B":
            needed = "B" if hop + 1 < len(route) else "F"
            needs = Action(needed, min(hop + 1, len(route) - 1), microbatch)
            assert at[needs] < at[Action("B", hop, microbatch)]


@pytest.mark.parametrize("only", ["F", "B"])
def test_forwards_or_backwards_alone_run_in_order(only):
    schedule = make_schedule("zb-h1", [0, 1, 2], 4)
    played = Played(schedule, only=only).run()
    assert played.lanes == [
        [a for a in lane if (a.kind == "F") == (only == "F")] for lane in schedule.lanes
    ]


@settings(max_examples=examples(50))
@given(names, routes, st.integers(1, 6), st.data())
def test_a_failure_anywhere_is_the_callers_and_ends_the_step(name, route, microbatches, data):
    """It is the error itself; no action runs after the step has ended."""
    schedule = make_schedule(name, route, microbatches)
    bad = data.draw(st.sampled_from([a for lane in schedule.lanes for a in lane]))
    error = ValueError("on purpose")

    def fails(action):
        if action == bad:
            raise error

    played = Played(schedule, on=fails)
    with pytest.raises(ValueError, match="on purpose") as caught:
        played.run()
    assert caught.value is error
    ran = [list(lane) for lane in played.lanes]
    assert all(
        lane == list(full)[: len(lane)] for lane, full in zip(ran, schedule.lanes, strict=True)
    )
    assert played.threads._running == 0
    assert played.lanes == ran


@pytest.mark.parametrize(("queued", "most"), [(True, 1), (False, 2)])
def test_on_asynchronous_devices_one_forward_runs_at_a_time(queued, most):
    """The others wait for it, although their lanes are free; on the CPU they do not."""
    inside, seen, both = [], [], threading.Barrier(2)

    def meet(action):
        if action in (Action("F", 0, 1), Action("F", 1, 0)):  # on two lanes, and due together
            inside.append(action)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5 if queued else 20)
            seen.append(len(inside))
            inside.remove(action)

    Played(make_schedule("gpipe", [0, 1], 2), on=meet, queued=queued).run()
    assert max(seen) == most
