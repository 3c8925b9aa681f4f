"""How long work takes: lines, and rates that are stated."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpipe.costs.rates import STATED_CPU, Line, Pair, Rates, straight
from blockpipe.costs.work import PASS, PRODUCT, Operation, Work

LINE = Line(((10.0, 1.0), (20.0, 3.0)))


@pytest.mark.parametrize(
    ("amount", "seconds"), [(0, 1), (10, 1), (15, 2), (20, 3), (40, 7)], ids=str
)
def test_a_line_goes_through_its_points(amount, seconds):
    """Below the first it is flat; beyond the last it goes on."""
    assert LINE.seconds(amount) == pytest.approx(seconds)


def test_one_point_is_a_line():
    """From nothing through it; and what is less takes as long."""
    line = Line(((10.0, 2.0),))
    assert (line.seconds(5), line.seconds(20), line.per_unit) == (2, 4, 0.2)


def test_a_straight_line_is_a_fixed_time_and_a_rate():
    line = straight(0.5, 100.0)
    assert line.seconds(50) == pytest.approx(1.0)
    assert straight(0.0, float("inf")).seconds(1e12) == 0


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=5, unique=True), st.floats(0, 1e10))
def test_more_work_takes_no_less_time(amounts, amount):
    points = tuple((a, i * 1e-3) for i, a in enumerate(sorted(amounts)))
    line = Line(points)
    assert line.seconds(amount) <= line.seconds(2 * amount + 1) * (1 + 1e-9)


def test_work_is_added_up():
    """Each operation by its kind's line: products by arithmetic and bytes, all else by bytes."""
    asked = []

    def find(kind, dtype):
        asked.append((kind, dtype))
        if kind == PRODUCT:
            return Pair(straight(0.0, 10.0, 0.01), straight(1.0, 10.0))
        return Pair(straight(0.0, 100.0), straight(0.0, 50.0))

    rates = Rates("made up", find)
    product, other = Operation(PRODUCT, "float32", 20.0, 100), Operation(PASS, "", 0.0, 200)
    work = Work(Counter({product: 2, other: 3}), Counter({product: 1, other: 1}))
    assert rates.forward(work) == pytest.approx(2 * (2 + 1) + 3 * 2)
    assert rates.backward(work) == pytest.approx(1 + 2 + 4)
    assert sorted(asked) == [(PASS, ""), (PRODUCT, "float32")], "each is looked for once"


def test_stated_rates_know_every_kind():
    seconds = STATED_CPU.forward(Work(Counter([Operation("anything", "", 0.0, 10**10)])))
    assert seconds == pytest.approx(1.0, rel=0.01)
