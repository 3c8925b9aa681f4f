"""Numbers that remember the comparisons that a forward makes with them, for later steps to
repeat."""

import itertools
import operator
from collections.abc import Callable, Hashable
from typing import Any

_ASKS = ("lt", "le", "eq", "ne", "gt", "ge")
_COMPUTES = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")

# What was done to a number, one after the other: an operator's name, the other operand, and whether
# that one came first.
Steps = tuple[tuple[str, Any, bool], ...]
Where = tuple[int, Hashable]  # an object by its id, and a name in it
# A place, and what was done to the number there; the last of that answers yes or no.
Question = tuple[Where, Steps]
Ask = Callable[[Where, Steps], None]


def done(value: Any, step: tuple[str, Any, bool]) -> Any:
    name, other, is_first = step
    if name == "bool":
        return bool(value)
    function = getattr(operator, name)
    return function(other, value) if is_first else function(value, other)


class _Watched:
    """A number that remembers what it was asked, and of which number it was computed."""

    _steps: Steps
    _told: tuple[Ask, Where]

    def __bool__(self) -> bool:
        self._tell(("bool", None, False))
        return bool(plain(self))

    def __reduce__(self) -> Any:  # copies are plain numbers
        return type(plain(self)), (plain(self),)

    def __copy__(self) -> Any:
        return plain(self)

    def __deepcopy__(self, memo: object) -> Any:
        return plain(self)

    def _tell(self, step: tuple[str, Any, bool]) -> None:
        ask, where = self._told
        ask(where, (*self._steps, step))


class _WatchedInt(_Watched, int):
    __hash__ = int.__hash__


class _WatchedFloat(_Watched, float):
    __hash__ = float.__hash__


def watched(value: Any, steps: Steps, *told: Any) -> Any:
    if type(value) is tuple:
        at = ((*steps, ("getitem", index, False)) for index in itertools.count())
        members = tuple(watched(member, of, *told) for member, of in zip(value, at, strict=False))
        return value if all(map(operator.is_, members, value)) else members
    kind = {int: _WatchedInt, float: _WatchedFloat}.get(type(value))
    if kind is None:
        return value
    found: Any = kind(value)
    found._steps, found._told = steps, told
    return found


def plain(value: Any) -> Any:
    if isinstance(value, _WatchedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _WatchedFloat) else value


def _asks(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        other = plain(other)
        self._tell((name, other, False))
        return getattr(operator, name)(plain(self), other)

    return method


def _computes(name: str, *, is_first: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        step = name, plain(other), is_first
        return watched(done(plain(self), step), (*self._steps, step), *self._told)

    return method


for _name in _ASKS:
    setattr(_Watched, f"__{_name}__", _asks(_name))
for _name in _COMPUTES:
    setattr(_Watched, f"__{_name}__", _computes(_name, is_first=False))
    setattr(_Watched, f"__r{_name}__", _computes(_name, is_first=True))
