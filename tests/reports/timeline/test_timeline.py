"""Timelines as data, text, Chrome's format and figures: of schedules, and by hand."""

import json
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blockpipe as bp
from blockpipe.errors import ScheduleError, UsageError
from blockpipe.reports.timeline.chrome import chrome_trace
from blockpipe.reports.timeline.timeline import Timeline
from blockpipe.reports.timeline.trace import Event, Lane, StepInfo, in_rows
from blockpipe.schedules.builders import SCHEDULES, make_schedule
from blockpipe.schedules.simulation import Costs, simulate

from ...schedules.test_schedule import routes
from ...stage_devices import examples


@st.composite
def drawn(draw):
    """A schedule, with costs that fit it."""
    route = draw(routes)
    time = st.integers(0, 9).map(float)
    per_hop = st.lists(time, min_size=len(route), max_size=len(route))
    forward, backward, transfer, restore = (draw(per_hop) for _ in range(4))
    costs = Costs(forward, backward, [b / 2 for b in backward], transfer, recompute=restore)
    schedule = make_schedule(draw(st.sampled_from(SCHEDULES)), route, draw(st.integers(1, 6)))
    if draw(st.booleans()):
        schedule = schedule.with_recomputed(lambda hop, m: (hop + m) % 2 == 0)
    return schedule, costs


@given(drawn())
@settings(deadline=None)
def test_a_schedules_timeline_is_its_simulation(case):
    """Every action once, on its lane, when the simulation starts it; busy and bubble are equal."""
    schedule, costs = case
    timeline, played = Timeline.of(schedule, costs), simulate(schedule, costs)
    found = [(e.lane, e.kind, e.hop, e.microbatch, e.start) for e in timeline.actions()]
    assert sorted(found) == sorted(
        (lane, *action, start)
        for lane, actions in enumerate(schedule.lanes)
        for action, start in zip(actions, played.starts[lane], strict=True)
    )
    assert timeline.busy() == pytest.approx(played.busy)
    if played.makespan:
        first = min(min(starts) for starts in played.starts)
        assert first == 0
        assert timeline.step_time == pytest.approx(played.makespan)
        assert timeline.bubble() == pytest.approx(played.bubble)
    assert max((e.end for e in timeline.actions()), default=0) == pytest.approx(played.makespan)


@given(drawn())
@settings(deadline=None)
def test_costs_of_a_timeline_play_out_as_it_does(case):
    """What a timeline says that the hops cost plays out as what it was made with."""
    schedule, costs = case
    free = Costs(costs.forward, costs.backward, costs.weight, recompute=costs.recompute)
    timeline = Timeline.of(schedule, free)
    again = timeline.predicted()
    assert again.step_time == pytest.approx(timeline.step_time)
    assert again.busy() == pytest.approx(timeline.busy())


@given(drawn(), st.integers(20, 140))
@settings(deadline=None)
def test_text_is_as_wide_as_asked(case, width):
    """Lines are as wide as asked; what is printed fits 100 characters, and has every lane."""
    timeline = Timeline.of(*case)
    assert all(len(line) <= width for line in timeline.gantt(width=width).splitlines())
    text = str(timeline)
    assert all(len(line) <= 100 for line in text.splitlines())
    if timeline.step_time:
        assert text.count("lane ") == 2 * len(timeline.lanes)


def test_the_chart_of_a_known_schedule():
    """GPipe over two lanes, two characters a unit: what runs, and whose it is."""
    timeline = Timeline.of(make_schedule("gpipe", [0, 1], 2))
    assert timeline.gantt(width=26) == (
        "lane 0  FFFF······BBBBBBBB\n"
        "        0011      00001111\n"
        "lane 1  ··FFFFBBBBBBBB····\n"
        "          001100001111"
    )


def test_the_table_adds_up():
    """Each printed figure, by hand: F, B and W one unit, a copy of a half between the lanes."""
    timeline = Timeline.of(make_schedule("zb-h1", [0, 1], 2), Costs(transfer=0.5))
    rows = {line.split()[0]: line.split() for line in str(timeline).splitlines() if line}
    assert timeline.busy() == [6.0, 6.0]
    span = timeline.step_time
    assert rows["all"][1] == "12"
    assert rows["all"][2:4] == [f"{100 * (1 - 12 / (2 * span)):.1f}", "%"]
    assert rows["all"][4:7] == ["4", "4", "4"]
    assert rows["all"][7] == "2"  # four crossings of a half
    assert rows["zb-h1"] == ["zb-h1", f"{span:.4g}", *rows["all"][2:4], "1.00"]


@given(drawn())
@settings(deadline=None, max_examples=examples(50))
def test_chrome_traces_are_valid(case):
    """JSON with the keys of each kind of event; nothing overlaps in a thread; arrows start in a
    slice and end at one."""
    timeline = Timeline.of(*case)
    check_chrome(json.loads(json.dumps(chrome_trace(timeline))), timeline)


def check_chrome(trace, timeline):
    """As the format has it."""
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} <= {"X", "M", "s", "f"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    assert len(slices) == len(timeline.events)
    assert sum(e["dur"] for e in slices) == pytest.approx(
        1e6 * sum(e.duration for e in timeline.events), abs=1e-3 * len(slices) + 1e-9
    )
    threads = {}
    for e in slices:
        assert {"hop", "stage", "micro-batch", "step"} <= e["args"].keys()
        begin, took = round(1000 * e["ts"]), round(1000 * e["dur"])
        threads.setdefault((e["pid"], e["tid"]), []).append((begin, begin + took))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == threads.keys()
    flows = {}
    for e in events:
        if e["ph"] in "sf":
            flows.setdefault(e["id"], []).append(e)
            at = round(1000 * e["ts"])
            assert any(a <= at <= b for a, b in threads[e["pid"], e["tid"]])
    for start, end in flows.values():
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert start["ts"] <= end["ts"]


def by_hand(events, lanes=2):
    schedule = make_schedule("gpipe", list(range(lanes)), 1)
    info = StepInfo(schedule, tuple(range(lanes)))
    return Timeline(events, [Lane(f"lane {n}") for n in range(lanes)], [info], "", "mine")


def test_stalls_do_not_count_as_work():
    """What a lane stands still in an action is bubble, also where two waits overlap."""
    timeline = by_hand(
        [
            Event("F", 0, 0, 0, 0, 0, 0.0, 4.0),
            Event("F", 1, 1, 1, 0, 0, 2.0, 8.0),
            Event("stall", 1, 1, 1, 0, 0, 1.0, 4.0),
            Event("stall", 1, 1, 1, 0, 0, 3.0, 5.0),
            Event("stall", 1, 1, 1, 0, 0, 7.0, 9.0),
        ]
    )
    assert timeline.busy() == [4.0, 2.0]
    assert timeline.totals()[1].stalls == 4.0
    assert timeline.bubble() == 1 - 6 / 16
    assert timeline.imbalance() == 4 * 2 / 6
    assert timeline.costs().forward == [4.0, 2.0]


def test_a_failed_step_does_not_count():
    """Means are over the steps that ended."""
    timeline = by_hand(
        [
            Event("F", 0, 0, 0, 0, 0, 0.0, 4.0),
            Event("F", 0, 0, 0, 0, 1, 5.0, 6.0),
            Event("F", 1, 1, 1, 0, 1, 6.0, 7.0),
        ]
    )
    good = timeline.steps[0]
    timeline.steps = [StepInfo(good.schedule, good.lanes, failed=True), good]
    assert timeline.step_time == 2.0
    assert timeline.busy() == [1.0, 1.0]
    assert "a step has failed" in str(timeline)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5))))
def test_rows_hold_everything_without_overlap(spans):
    """Each event once, as few rows as there are events at one time."""
    events = [Event("copy", 0, 0, 0, 0, 0, float(a), float(a + n)) for a, n in spans]
    rows = in_rows(events)
    assert sorted(e for row in rows for e in row) == sorted(events)
    for row in rows:
        assert all(a.end <= b.start for a, b in pairwise(row))
    if all(n for _, n in spans):
        at_once = max((sum(e.start <= t < e.end for e in events) for t in range(26)), default=0)
        assert len(rows) == at_once


def test_an_empty_timeline_says_so_in_every_form():
    """Nothing ran: it says so, in every form."""
    empty = Timeline()
    assert str(empty) == "nothing ran: an empty timeline"
    assert (empty.gantt(), empty.bubble(), empty.step_time, empty.busy()) == ("", 0.0, 0.0, [])
    assert empty.predicted() is None
    assert empty.to_dict()["events"] == []
    assert "0 steps" in repr(empty)
    assert empty.to_html().startswith("<!DOCTYPE html>")


def test_steps_count_from_the_end_too():
    """-1 is the last, wherever a step is asked for."""
    timeline = Timeline.of(make_schedule("1f1b", [0, 1], 3))
    assert timeline.bubble(-1) == timeline.bubble(0) == 0.25
    assert timeline.span(-1) == 12
    assert timeline.actions(-1) == timeline.actions()


def test_to_dict_survives_json():
    """``to_dict`` survives JSON, and has what the table has."""
    timeline = Timeline.of(make_schedule("1f1b", [0, 1], 3))
    found = json.loads(json.dumps(timeline.to_dict()))
    assert found == timeline.to_dict()
    assert found["bubble"] == 0.25
    assert [lane["busy"] for lane in found["totals"]] == [9.0, 9.0]
    assert len(found["events"]) == 12 + 1


def test_wrong_arguments_are_refused(tmp_path):
    """A step that is not there, a unit that is none, what is no schedule."""
    timeline = Timeline.of(make_schedule("1f1b", [0, 1], 3))
    with pytest.raises(
        UsageError, match=r"one of 1 steps, from -1 to 0, for step, got 1 \(.*test_timeli"
    ):
        timeline.gantt(step=1)
    with pytest.raises(UsageError, match="for step, got -2"):
        timeline.plot(step=-2)
    for ask in (
        timeline.span,
        timeline.bubble,
        timeline.totals,
        timeline.costs,
        timeline.predicted,
    ):
        with pytest.raises(UsageError, match=r"one of 1 steps.*for step, got 9 .*test_timeline.py"):
            ask(9)
    with pytest.raises(UsageError, match="for step, got 'last'"):
        timeline.busy("last")
    with pytest.raises(
        UsageError, match=r"an integer from 20 up for width, got 5 \(.*test_timeline"
    ):
        timeline.gantt(width=5)
    with pytest.raises(ScheduleError, match="'' or 's' .seconds. for unit, got 'ms'"):
        Timeline.of(make_schedule("1f1b", [0, 1], 3), unit="ms")
    with pytest.raises(ScheduleError, match="expected a Schedule for schedule, got '1f1b'"):
        Timeline.of("1f1b")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        timeline.to_html(tmp_path / "nowhere" / "t.html")


def test_a_name_from_outside_stays_text():
    """A schedule's name is the user's: on the page it is no markup."""
    name = "</script><script>alert('x')</script><!--"
    schedule = make_schedule("1f1b", [0, 1], 2)
    named = bp.Schedule(name, schedule.lane_of_hop, 2, schedule.lanes)
    page = Timeline.of(named).to_html()
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert "&lt;script&gt;" in page
    assert "srcdoc=" in Timeline.of(named)._repr_html_()


def test_a_name_that_no_file_can_hold(tmp_path):
    """Half of a surrogate pair is written as it is escaped."""
    schedule = make_schedule("1f1b", [0], 1)
    named = bp.Schedule("half \ud800", schedule.lane_of_hop, 1, schedule.lanes)
    timeline = Timeline.of(named)
    timeline.to_html(tmp_path / "t.html")
    assert "<title>half \\ud800" in (tmp_path / "t.html").read_text(encoding="utf-8")
    assert str(timeline).startswith("half \\ud800\n")


def test_a_figure_has_a_bar_for_each_action():
    """A bar for each action, on its lane; on axes of one's own, too."""
    pyplot = _pyplot()
    timeline = Timeline.of(make_schedule("zb-h1", [0, 1], 3))
    figure = timeline.plot()
    (axes,) = figure.axes
    assert sum(len(bars) for bars in axes.containers) == 18
    assert sorted({round(p.get_y() + p.get_height() / 2) for p in axes.patches}) == [0, 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lane 0", "lane 1"]
    own, ax = pyplot.subplots()
    assert timeline.plot(ax) is own
    pyplot.close("all")


def _pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    return pytest.importorskip("matplotlib.pyplot")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    """The error says what to install, and what works without."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UsageError, match=r"test_timeline.py.*pip install 'blockpipe\[plot\]'"):
        Timeline.of(make_schedule("1f1b", [0], 1)).plot()
