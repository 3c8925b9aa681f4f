"""Numbers that users pass, checked: counts, and lists with one number for each stage or item."""

from collections.abc import Sequence
from math import inf

from .._common.callsite import users_line
from .._common.checks import expected, is_integer, is_number
from ..errors import PlanError

_MOST = 2**20  # of anything that is counted: lists of that many are made
_LEAST_NUMBER, _MOST_NUMBER = 1e-100, 1e100  # their squares and quotients are floats too


def checked_numbers(
    name: str, values: object, count: int | None = None, *, positive: bool = True
) -> list[float]:
    """Return an argument's numbers as floats.

    Args:
        name: the argument's name.
        values: a sequence of numbers.
        count: the number of entries that are expected; ``None`` allows any.
        positive: whether an entry of 0 is wrong.

    Raises:
        PlanError: the argument is not a sequence, has another length, or an entry is not a number
            in the range.
    """
    tolist = getattr(values, "tolist", None)  # a tensor's, an array's
    values = tolist() if callable(tolist) else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PlanError(expected("a list of numbers", values, for_=name))
    if count is not None and len(values) != count:
        numbers = "number" if count == 1 else "numbers"
        raise PlanError(
            f"expected {count} {numbers} for {name}, got {len(values)} ({users_line()}); pass one "
            "for each stage or item"
        )
    for index, value in enumerate(values):
        _check_number(value, f"{name}[{index}]", positive=positive)
    return list(map(float, values))


def checked_number(name: str, value: object, *, positive: bool = False) -> float:
    """Return an argument's number as a float.

    Raises:
        PlanError: it is not a number in the range.
    """
    return _check_number(value, name, positive=positive)


def check_count(name: str, value: object) -> int:
    """Return an argument that is a positive integer.

    Raises:
        PlanError: it is not, or is beyond what lists are made of.
    """
    if not is_integer(value, 1):
        raise PlanError(expected("a positive integer", value, for_=name))
    if value > _MOST:
        raise PlanError(expected(f"an integer up to {_MOST}", value, for_=name))
    return value


def _check_number(value: object, name: str, *, positive: bool) -> float:
    if not is_number(value) or not (value > 0 if positive else 0 <= value < inf):
        contract = "a positive number" if positive else "a finite number from 0 up"
        raise PlanError(expected(contract, value, for_=name))
    if value not in (0, inf) and not _LEAST_NUMBER <= value <= _MOST_NUMBER:
        contract = f"a number from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
        raise PlanError(expected(contract, value, for_=name))
    return float(value)
