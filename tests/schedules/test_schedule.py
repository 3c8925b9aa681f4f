"""Schedules: exact tables, bubbles against the formulas, and properties over all routes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpipe.errors import ScheduleError
from blockpipe.schedules.builders import SCHEDULES, choose, make_schedule
from blockpipe.schedules.schedule import Action, Actions, Schedule
from blockpipe.schedules.simulation import Costs, simulate, validate

from ..stage_devices import examples


def looped(lanes, visits):
    """Hops over the lanes, again and again."""
    return list(range(lanes)) * visits


def vee(lanes):
    """Hops over the lanes and back."""
    return [*range(lanes), *reversed(range(lanes))]


routes = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
        lambda route: [sorted(set(route)).index(lane) for lane in route]
    ),
    st.builds(looped, st.integers(1, 4), st.integers(1, 3)),
    st.builds(vee, st.integers(1, 4)),
)
names = st.sampled_from(SCHEDULES)
counts = st.integers(1, 9)
limits = st.one_of(st.none(), st.integers(1, 6))


def kinds(schedule):
    return ["".join(f"{a.kind}{a.microbatch}" for a in lane) for lane in schedule.lanes]


def test_1f1b_warms_up_and_alternates():
    """Four hops, five micro-batches: warm-up of 4, 3, 2, 1, then one forward, one backward."""
    schedule = make_schedule("1f1b", [0, 1, 2, 3], 5)
    assert kinds(schedule) == [
        "F0F1F2F3B0F4B1B2B3B4",
        "F0F1F2B0F3B1F4B2B3B4",
        "F0F1B0F2B1F3B2F4B3B4",
        "F0B0F1B1F2B2F3B3F4B4",
    ]
    assert schedule.in_flight() == 4


def test_gpipe_has_all_forwards_before_all_backwards():
    """All forwards, then all backwards, on every lane."""
    assert str(make_schedule("gpipe", [0, 1], 2)) == (
        "lane 0: F0.0 F0.1 B0.0 B0.1\nlane 1: F1.0 F1.1 B1.0 B1.1"
    )


def test_zb_h1_fills_the_end_with_weight_parts():
    """Weight parts stay as many micro-batches behind as the hop's index; they fill the end."""
    assert kinds(make_schedule("zb-h1", [0, 1, 2], 4)) == [
        "F0F1F2B0W0F3B1W1B2W2B3W3",
        "F0F1B0F2B1W0F3B2W1B3W2W3",
        "F0B0F1B1F2B2W0F3B3W1W2W3",
    ]


def test_interleaved_goes_visit_by_visit():
    """Two lanes, two visits: forwards in groups of two micro-batches, visit by visit."""
    schedule = make_schedule("interleaved", [0, 1, 0, 1], 2)
    assert [str(Actions(lane)) for lane in schedule.lanes] == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]


@pytest.mark.parametrize(("lanes", "count"), [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_bubbles_are_those_of_the_formulas(lanes, count):
    """F = B = W = 1: the published bubbles, and no more memory than they say."""
    chain = list(range(lanes))
    wait = lanes - 1

    def bubble(name, route):
        found = simulate(make_schedule(name, route, count))
        return pytest.approx(found.bubble, abs=1e-9), max(found.peak)

    assert bubble("gpipe", chain) == (wait / (count + wait), count)
    assert bubble("1f1b", chain) == (wait / (count + wait), lanes)
    assert bubble("zb-h1", chain) == (wait / (3 * count + wait), lanes)
    interleaved, _ = bubble("interleaved", looped(lanes, 2))
    assert interleaved == wait / (2 * count + wait)
    _, kept = bubble("zb-v", vee(lanes))
    assert kept == 2 * lanes, "as many as 1F1B keeps of hops of twice the size"


@pytest.mark.parametrize(("lanes", "count", "share"), [(4, 8, 0.0588), (4, 32, 0.0154)])
def test_zb_v_is_as_good_as_published(lanes, count, share):
    """Half a unit for each lane before the last, where memory lets it."""
    assert simulate(make_schedule("zb-v", vee(lanes), count)).bubble == pytest.approx(
        share, abs=1e-3
    )


@given(names, routes, counts, limits)
def test_every_schedule_can_run(name, route, microbatches, in_flight):
    """Every action runs once, in an order that respects the data and the limit."""
    schedule = make_schedule(name, route, microbatches, in_flight=in_flight)
    validate(schedule)
    if in_flight is not None:
        assert schedule.in_flight() <= in_flight


@given(names, routes, counts)
def test_every_hop_takes_micro_batches_in_order(name, route, microbatches):
    """Gradients add up in micro-batch order on every hop, and buffers are written in it."""
    schedule = make_schedule(name, route, microbatches)
    for lane in schedule.lanes:
        for kind in "FBW":
            for hop in range(len(route)):
                order = [a.microbatch for a in lane if a.kind == kind and a.hop == hop]
                assert order == sorted(order)


@given(routes, counts)
def test_1f1b_holds_no_more_than_its_hops(route, microbatches):
    """At most as many micro-batches are in flight as there are hops."""
    assert make_schedule("1f1b", route, microbatches).in_flight() <= len(route)
    assert make_schedule("sequential", route, microbatches).in_flight() == 1


@given(st.sampled_from(["zb-h1", "zb-v"]), routes, counts, st.data())
def test_what_is_not_separable_has_no_weight_part(name, route, microbatches, data):
    """Its backward is whole; the others' are split."""
    splits_backward = data.draw(st.lists(st.booleans(), min_size=len(route), max_size=len(route)))
    schedule = make_schedule(name, route, microbatches, splits_backward=splits_backward)
    validate(schedule)
    split = {(h, m) for h, yes in enumerate(splits_backward) if yes for m in range(microbatches)}
    assert schedule.split() == split


@given(names, routes, counts)
def test_csv_and_back_is_the_identity(name, route, microbatches):
    """To CSV and back is the identity, lanes numbered by their first hop's row."""
    schedule = make_schedule(name, route, microbatches)
    assert Schedule.from_csv(schedule.to_csv(), name) == schedule


def test_csv_of_torch_distributed_is_read():
    """Theirs has I for the input part, and empty cells where a rank waits."""
    text = "0F0,0F1,,,0B0,0B1\n,1F0,1I0,1W0,1F1,1B1\n"
    schedule = Schedule.from_csv(text)
    assert schedule.lanes[1][1] == Action("B", 1, 0)
    assert schedule.split() == {(1, 0)}
    validate(schedule)
    assert "1I0,1W0" in schedule.to_csv()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", r"expected a hop, one of F.* for row 1, column 2 of the CSV, got '0X0'"),
        ("0F0,0B0\n0F1", r"row 2, column 1 of the CSV has hop 0, which is on row 1 too"),
        ("1F0,1B0", r"no action of the hops \[0\]; number hops 0, 1, … without gaps"),
        ("", "expected CSV text with a row of actions for each lane, got ''"),
        (None, "expected CSV text.*got None"),
        ("0F99999999999999999999,0B0", "expected a hop.* for row 1, column 1"),
        ("9999999F0", "expected a hop.* for row 1, column 1"),
        ("F", r"row 1, column 1.*got 'F'"),
        ("0F1099511627775,0B0", r"no action of the micro-batches \[1, 2, 3, 4, 5, 6, 7, 8\]"),
        ("1048575F0,1048575B0", r"no action of the hops \[0, 1, 2, 3, 4, 5, 6, 7\]"),
        (f"0F{'9' * 5000}", r"a micro-batch below 1,099,511,627,776.*got '0F9{98}' "),
    ],
)
def test_bad_csv_is_refused(text, message):
    """With its row and column."""
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_an_impossible_schedule_names_its_first_impossible_action():
    """A backward before its forward, one that is missing, double, unknown, or on a wrong lane."""
    good = make_schedule("gpipe", [0, 1], 1)

    def with_first_lane(*actions):
        return Schedule("mine", (0, 1), 1, (actions, good.lanes[1]))

    forward, backward = good.lanes[0]
    with pytest.raises(ScheduleError, match=r"'mine' deadlocks: lane 0, entry 0 \(B0.0\) needs F0"):
        validate(with_first_lane(backward, forward))
    with pytest.raises(ScheduleError, match="schedule 'mine' has F0.0 twice"):
        validate(with_first_lane(forward, backward, forward))
    with pytest.raises(ScheduleError, match="schedule 'mine' has no B0.0"):
        validate(with_first_lane(forward))
    with pytest.raises(
        ScheduleError, match="has F0.1 on lane 0, but only 2 hops and 1 micro-batches"
    ):
        validate(with_first_lane(forward, backward, Action("F", 0, 1)))
    with pytest.raises(
        ScheduleError, match="has F1.0 on lane 0, but its lane_of_hop puts hop 1 on lane 1"
    ):
        validate(with_first_lane(forward, backward, Action("F", 1, 0)))
    with pytest.raises(ScheduleError, match=r"entry 1 \(W0.0\) needs B0.0"):
        validate(with_first_lane(forward, Action("W", 0, 0), backward))


def test_memory_is_for_the_actions_that_are_there():
    """A schedule that claims more micro-batches than any memory holds lacks an action."""
    actions = [Action("F", 0, 0), Action("B", 0, 0)]
    with pytest.raises(ScheduleError, match="schedule 'mine' has no F0.1"):
        validate(Schedule("mine", (0,), 2**40, (actions,)))


def test_micro_batches_out_of_order_are_refused():
    """A hop's gradients would add up in another order than the plain loop's."""
    f, b, w = (lambda m, k=k: Action(k, 0, m) for k in "FBW")
    with pytest.raises(ScheduleError, match=r"F0.0 after that of a later micro-batch"):
        validate(Schedule("mine", (0,), 2, ((f(1), f(0), b(0), b(1)),)))
    with pytest.raises(ScheduleError, match=r"W0.0 after that of a later micro-batch"):
        validate(Schedule("mine", (0,), 2, ((f(0), f(1), b(0), b(1), w(0)),)))


def test_wrong_arguments_are_refused():
    """An unknown name, no hop, a limit that is none, what is no action."""
    with pytest.raises(
        ScheduleError, match="one of 'sequential', 'gpipe', '1f1b'.*got 'zb'.*did you mean"
    ):
        make_schedule("zb", [0], 1)
    with pytest.raises(
        ScheduleError, match="expected an integer from 1 to 1,099,.* for microbatches, got 0"
    ):
        make_schedule("gpipe", [0], 0)
    with pytest.raises(ScheduleError, match="a positive integer or None for in_flight, got 0"):
        make_schedule("gpipe", [0], 1, in_flight=0)
    with pytest.raises(
        ScheduleError, match=r"numbered 0, 1, … without gaps for lane_of_hop, got \(0, 2\)"
    ):
        make_schedule("gpipe", [0, 2], 1)
    with pytest.raises(
        ScheduleError, match="between 1 and 1,048,576 hops for lane_of_hop, got 1000000000"
    ):
        make_schedule("gpipe", range(10**9), 1)
    with pytest.raises(ScheduleError, match="one entry for each of the 2 hops for splits_backward"):
        make_schedule("zb-h1", [0, 1], 1, splits_backward=[True])
    with pytest.raises(ScheduleError, match="a non-negative integer for microbatches, got '2'"):
        Schedule("mine", (0,), "2", ([],))
    with pytest.raises(ScheduleError, match="a Schedule for schedule, got '1f1b'"):
        simulate("1f1b")
    with pytest.raises(
        ScheduleError, match=r"expected an Action.*for an entry of lanes, got \('X', 0, 0\)"
    ):
        Schedule("mine", (0,), 1, ([("X", 0, 0)],))


# --- playing out


def test_a_simulation_is_what_is_counted_by_hand():
    """Two lanes, one micro-batch, a transfer of one: every time can be counted."""
    found = simulate(
        make_schedule("gpipe", [0, 1], 1),
        Costs(forward=[1, 2], backward=[3, 4], transfer=1, activation=[10, 20]),
    )
    assert found.makespan == 1 + 1 + 2 + 4 + 1 + 3
    assert found.busy == [4, 6]
    assert found.peak == [10, 20]
    assert [list(starts) for starts in found.starts] == [[0, 9], [2, 4]]
    assert found.bubble == pytest.approx(1 - 10 / 24)
    assert "gpipe: 12 long, 58.3 % bubble" in str(found)


@given(names, routes, counts, st.data())
@settings(deadline=None)
def test_a_simulation_respects_what_actions_need(name, route, microbatches, data):
    """No lane does two things at once, nothing starts before its inputs are there."""
    time = st.integers(0, 9).map(float)
    hops = len(route)
    per_hop = st.lists(time, min_size=hops, max_size=hops)
    forward, backward, transfer = (data.draw(per_hop) for _ in range(3))
    weight = [b / 2 for b in backward]
    costs = Costs(forward, backward, weight, transfer)
    schedule = make_schedule(name, route, microbatches)
    found = simulate(schedule, costs)
    split = schedule.split()
    begins, ends = {}, {}
    for lane, starts in zip(schedule.lanes, found.starts, strict=True):
        free = 0.0
        for action, start in zip(lane, starts, strict=True):
            f, b, w = costs.of(action.hop)
            both = (action.hop, action.microbatch) in split
            took = {"F": f, "B": b - w if both else b, "W": w}[action.kind]
            assert start >= free
            begins[action], free = start, start + took
            ends[action] = free
    for action in begins:
        kind, hop, m = action
        needs = {
            "F": [Action("F", hop - 1, m)] if hop else [],
            "B": [Action("F", hop, m)] + ([Action("B", hop + 1, m)] if hop + 1 < hops else []),
            "W": [Action("B", hop, m)],
        }[kind]
        for need in needs:
            link = min(need.hop, hop)
            crosses = need.hop != hop and route[need.hop] != route[hop]
            assert begins[action] >= ends[need] + (transfer[link] if crosses else 0)
    assert found.makespan == max(ends.values())


@pytest.mark.slow
def test_twenty_million_actions_are_simulated():
    """1000 stages, 10 000 micro-batches: packed, they are made and played out in one process."""
    schedule = make_schedule("1f1b", range(1000), 10_000)
    assert sum(map(len, schedule.lanes)) == 20_000_000
    found = simulate(schedule)
    assert found.makespan == 3 * (10_000 + 999)
    assert found.peak[0] == 1000


def test_costs_that_do_not_fit_are_refused():
    """One number for each hop, from 0 on."""
    schedule = make_schedule("gpipe", [0, 1], 2)
    with pytest.raises(ScheduleError, match="one for each of 2 hops, for forward.*it has 3"):
        simulate(schedule, Costs(forward=[1, 2, 3]))
    with pytest.raises(
        ScheduleError, match="a part of the backward's 1.0 for the weight of hop 0, got 5.0"
    ):
        simulate(schedule, Costs(backward=1, weight=5))
    with pytest.raises(ScheduleError, match="a number, or one for each.* for forward, got None"):
        simulate(schedule, Costs(forward=None))
    with pytest.raises(ScheduleError, match="finite times or sizes from 0 on for transfer, got -1"):
        simulate(schedule, Costs(transfer=-1))


# --- the choice


@given(routes, st.integers(1, 8), limits)
@settings(deadline=None, max_examples=examples(50))
def test_auto_takes_the_fastest(route, microbatches, in_flight):
    """Nothing that it tried is more than 2 % faster, and it says so."""
    choice = choose(route, microbatches, Costs(), in_flight=in_flight)
    best = choice.candidates[0]
    assert all(best.makespan <= 1.02 * other.makespan for other in choice.candidates)
    assert str(choice).startswith(best.schedule.name)


def test_auto_does_not_split_what_cannot_be():
    """With no separable hop no zero-bubble schedule is tried; of equals, 1F1B keeps less."""
    choice = choose([0, 1, 2], 8, Costs(), splits_backward=[False] * 3)
    assert {c.schedule.name for c in choice.candidates} == {"1f1b", "gpipe"}
    assert choice.schedule.name == "1f1b"


def test_auto_counts_what_is_made_again():
    """Where something is recomputed, all that is tried has its R actions, and takes their time."""
    kept = choose([0, 1], 4, Costs())
    again = choose([0, 1], 4, Costs(), recomputes=lambda hop, microbatch: microbatch < 3)
    assert {found.schedule.name for found in kept.candidates} == {
        found.schedule.name for found in again.candidates
    }
    for found in again.candidates:
        made = [str(action) for lane in found.schedule.lanes for action in lane]
        assert sorted(a for a in made if a[0] == "R") == [
            f"R{h}.{m}" for h in (0, 1) for m in range(3)
        ]
    assert again.candidates[0].makespan >= kept.candidates[0].makespan + 3


@pytest.mark.parametrize("numbers", [(-1, 0), (1 << 20, 0), (0, -1), (0, 1 << 40)])
def test_an_action_with_one_number_out_of_range(numbers):
    """Packed, it would be another action."""
    with pytest.raises(ScheduleError, match="with a hop below 1,048,576 and a micro-batch below"):
        Actions([Action("F", *numbers)])
