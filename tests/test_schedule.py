"""Schedules: exact tables, and properties over all routes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpipe.errors import ScheduleError
from blockpipe.schedule import SCHEDULES, Action, make_schedule, validate


def test_the_1f1b_table():
    """Four hops, five micro-batches: warm-up of 4, 3, 2, 1, then one forward, one backward."""
    schedule = make_schedule("1f1b", [0, 1, 2, 3], 5)
    kinds = ["".join(f"{a.kind}{a.microbatch}" for a in lane) for lane in schedule.lanes]
    assert kinds == [
        "F0F1F2F3B0F4B1B2B3B4",
        "F0F1F2B0F3B1F4B2B3B4",
        "F0F1B0F2B1F3B2F4B3B4",
        "F0B0F1B1F2B2F3B3F4B4",
    ]
    assert schedule.in_flight() == 4


def test_the_gpipe_table():
    """All forwards, then all backwards, on every lane."""
    assert str(make_schedule("gpipe", [0, 1], 2)) == (
        "lane 0: F0.0 F0.1 B0.0 B0.1\nlane 1: F1.0 F1.1 B1.0 B1.1"
    )


routes = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda route: [sorted(set(route)).index(lane) for lane in route]
)


@given(st.sampled_from(SCHEDULES), routes, st.integers(1, 9))
def test_every_schedule_can_run(name, route, microbatches):
    """Every (hop, micro-batch) runs once forward and once back, in an order that respects the data."""
    validate(make_schedule(name, route, microbatches))


@given(st.sampled_from(SCHEDULES), routes, st.integers(1, 9))
def test_every_hop_takes_micro_batches_in_order(name, route, microbatches):
    """Gradients add up in micro-batch order on every hop, and buffers are written in it."""
    schedule = make_schedule(name, route, microbatches)
    for lane in schedule.lanes:
        for kind in "FB":
            for hop in range(len(route)):
                order = [a.microbatch for a in lane if a.kind == kind and a.hop == hop]
                assert order == sorted(order)


@given(routes, st.integers(1, 9))
def test_1f1b_holds_no_more_than_its_hops(route, microbatches):
    """At most as many micro-batches are in flight as there are hops."""
    assert make_schedule("1f1b", route, microbatches).in_flight() <= len(route)
    assert make_schedule("sequential", route, microbatches).in_flight() == 1


def test_an_impossible_schedule_names_its_first_impossible_action():
    """A backward before its forward cannot run."""
    good = make_schedule("gpipe", [0, 1], 1)
    bad = replace(good, lanes=(good.lanes[0][::-1], good.lanes[1]))
    with pytest.raises(
        ScheduleError, match=r"lane 0 of gpipe comes to B0.0 \(entry 0\) which needs B1.0"
    ):
        validate(bad)
    twice = replace(good, lanes=(good.lanes[0] + (Action("F", 0, 0),), good.lanes[1]))
    with pytest.raises(ScheduleError, match="F0.0 is missing, double or unknown"):
        validate(twice)


def test_an_unknown_schedule_is_refused():
    """The message names those that there are."""
    with pytest.raises(ScheduleError, match="one of 'sequential', 'gpipe', '1f1b', but 'zb' came"):
        make_schedule("zb", [0], 1)
    with pytest.raises(ScheduleError, match="needs a hop and a micro-batch"):
        make_schedule("gpipe", [0], 0)
