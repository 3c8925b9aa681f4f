"""The sets that ``parameter_sets`` chooses."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..parameter_sets import each_value, every_pair, in_turn

AXES = st.lists(st.integers(1, 5), min_size=2, max_size=5)


@given(AXES)
def test_each_value_of_each_axis_is_in_a_set(lengths: list[int]) -> None:
    """And there are no more sets than the longest axis has values."""
    axes = {f"axis{n}": range(length) for n, length in enumerate(lengths)}
    _, rows = each_value(**axes).args
    assert len(rows) == max(lengths)
    for n, length in enumerate(lengths):
        assert {row[n] for row in rows} == set(range(length))


@given(AXES)
def test_every_two_values_of_two_axes_are_in_a_set_together(lengths: list[int]) -> None:
    """And there are less than half as many again as the longest two axes ask for, and one."""
    axes = {f"axis{n}": range(length) for n, length in enumerate(lengths)}
    names, rows = every_pair(**axes).args
    assert names == list(axes)
    for one, other in itertools.combinations(range(len(lengths)), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(itertools.product(range(lengths[one]), range(lengths[other])))
    *_, second, first = sorted(lengths)
    assert len(rows) <= 1.5 * first * second + 1


@pytest.mark.parametrize("way", [each_value, every_pair])
def test_sets_are_the_same_each_time(way) -> None:
    """A test that failed is found again by its name."""
    axes = {"a": ["x", "y", "z"], "b": [1, 2], "c": [True, False]}
    assert way(**axes).args == way(**axes).args


@given(st.sets(st.text()), st.integers(1, 9), st.integers(0))
def test_a_test_has_one_turn_of_those_in_a_row(names: set[str], one_in: int, turn: int) -> None:
    """So none is left out for long."""
    turns = [in_turn(names, one_in, now) for now in range(turn, turn + one_in)]
    assert sorted(name for now in turns for name in now) == sorted(names)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0))
def test_the_tests_of_a_folder_are_spread_over_the_turns(count: int, one_in: int, turn: int):
    """So that no turn has all those that take long."""
    names = [f"tests/distributed/test_a.py::test_b[{number}]" for number in range(count)]
    assert len(in_turn(names, one_in, turn)) in (count // one_in, -(-count // one_in))
