"""Parameter sets of tests with several axes: all that each value needs, and no full product.

A product of axes grows with each of them, and most of its sets prove nothing that others do not.
Defects come from a value, or from two of them together (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", 2004). The sets are chosen here and not by an
option, so that each run has the same ones.
"""

import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def each_value(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that each value of each axis is in a set: as many as the longest has.

    Args:
        axes: the values of each of the test's parameters.

    Example:
        >>> each_value(schedule=["gpipe", "1f1b", "zb-h1"], isolate=[False, True]).args[1]
        [('gpipe', False), ('1f1b', True), ('zb-h1', False)]
    """
    values = [list(axis) for axis in axes.values()]
    rows = [tuple(axis[row % len(axis)] for axis in values) for row in range(max(map(len, values)))]
    return _parametrized(axes, rows)


def every_pair(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that each two values of two axes are in a set together.

    For two axes that is their product. For more it is little more than the product of the longest
    two: sets are added one by one, each with as many pairs as possible that none had before.

    Args:
        axes: the values of each of the test's parameters.

    Example:
        >>> len(every_pair(a=range(4), b=range(4), c=range(2), d=range(2)).args[1])
        16
    """
    values = [list(axis) for axis in axes.values()]
    rows: list[tuple[int, ...]] = []
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(range(len(values)), 2)
        for a in range(len(values[one]))
        for b in range(len(values[other]))
    }
    while missing:
        chosen = dict(min(missing))
        for axis in range(len(values)):
            if axis not in chosen:
                chosen[axis] = _most_new(axis, len(values[axis]), chosen, missing)
        rows.append(tuple(chosen[axis] for axis in range(len(values))))
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
    return _parametrized(axes, [tuple(values[a][i] for a, i in enumerate(row)) for row in rows])


def in_turn(names: Iterable[str], one_in: int, turn: int) -> set[str]:
    """Return the tests that run in a turn, where one in so many does: those that are neighbours,
    and often take equally long, have different turns.

    Args:
        names: of all tests, such as ``tests/stages/test_plan.py::test_…``.
        one_in: the number of turns that run every test.
        turn: the number of this one.
    """
    by_folder: dict[str, list[str]] = {}
    for name in sorted(names):
        by_folder.setdefault("/".join(name.split("/")[:2]), []).append(name)
    return {
        name
        for folder, found in by_folder.items()  # a new test shifts the turns of its folder's alone
        for at, name in enumerate(found, start=zlib.crc32(folder.encode()) + turn)
        if at % one_in == 0
    }


def _most_new(axis: int, count: int, chosen: dict[int, int], missing: set[Any]) -> int:
    """The value of an axis that makes the most missing pairs with those that are chosen."""

    def new(value: int) -> int:
        pairs = (tuple(sorted([(axis, value), other])) for other in chosen.items())
        return sum(pair in missing for pair in pairs)

    return max(range(count), key=new)


def _parametrized(axes: Iterable[str], rows: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(list(axes), [_row(row) for row in rows], ids=_name)


def _row(values: tuple[Any, ...]) -> Any:
    """A set of values with the marks and names of those that are a ``pytest.param``."""
    if isinstance(values, ParameterSet):
        return values
    params = [value for value in values if isinstance(value, ParameterSet)]
    if not params:
        return values
    plain = [v.values[0] if isinstance(v, ParameterSet) else v for v in values]
    names = [v.id if isinstance(v, ParameterSet) else getattr(v, "__name__", v) for v in values]
    marks = [mark for param in params for mark in param.marks]
    return pytest.param(*plain, marks=marks, id="-".join(map(str, names)))


def _name(value: Any) -> str | None:
    """What stands for a value in the test's name, where pytest would number it."""
    return str(value) if isinstance(value, tuple | list | dict) else None
