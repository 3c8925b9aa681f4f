"""Numbers on modules that somebody sets between steps, and by which the forward turns.

``net.step = i`` in a training loop, ``if self.step >= self.warm_up`` in a forward: the step in
which that turns is another one than the recorded. To record at every change would be to record at
every step, so the recording gives the forward numbers that remember what they were asked, and each
step asks the same again. A float with such an integer on its right (``0.1 * self.step``) computes
a plain number: Python asks the integer nothing there.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ASKS = ("lt", "le", "eq", "ne", "gt", "ge")
_COMPUTES = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")

# What was done to a number, one after the other: an operator's name, the other operand, and whether
# that one came first.
Steps = tuple[tuple[str, Any, bool], ...]
# A module's path, its attribute, and what was done to it; the last of that answers yes or no.
Question = tuple[str, str, Steps]


class Steering:
    """The numbers on a model's modules, and what its forwards have asked of them.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (path, name, vars(module))
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        ]
        self._values = self._now()
        self._steered: dict[tuple[str, str], dict[str, Any]] = {}
        self._questions: dict[Question, None] = {}

    def _now(self) -> list[Any]:
        return [own.get(name) for _, name, own in self._places]

    def has_turned(self, changing: Iterable[str]) -> bool:
        """Whether a number was set since this was asked last, that never was before.

        Args:
            changing: attributes that the forward itself sets, by name.
        """
        now = self._now()
        if all(map(operator.is_, now, self._values)):
            return False
        own = set(changing)
        new = [
            (path, name)
            for (path, name, _), one, other in zip(self._places, now, self._values, strict=True)
            if one != other and f"{path}.{name}" not in own and (path, name) not in self._steered
        ]
        self._values = now
        self._steered |= {(p, n): vars_ for p, n, vars_ in self._places if (p, n) in new}
        return bool(new)

    def answers(self) -> tuple[bool, ...]:
        """What the forwards' questions come to by now."""
        return tuple(map(self._answer, self._questions)) if self._questions else ()

    def _answer(self, question: Question) -> bool:
        path, name, steps = question
        value = self._steered[path, name].get(name)
        try:
            for step in steps:
                value = _done(value, step)
            return bool(value)
        except Exception:  # it is no such number any more
            return False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While entered, those numbers remember what they are asked; for a recording."""
        before = [(own, name, own.get(name)) for (_, name), own in self._steered.items()]
        try:
            for (path, name), own in self._steered.items():
                if type(own.get(name)) in (int, float):
                    own[name] = _watched(own[name], (), self._ask, path, name)
            yield
        finally:
            for own, name, value in before:
                own[name] = value

    def _ask(self, path: str, name: str, steps: Steps) -> None:
        self._questions[path, name, steps] = None


def _done(value: Any, step: tuple[str, Any, bool]) -> Any:
    name, other, is_first = step
    if name == "bool":
        return bool(value)
    function = getattr(operator, name)
    return function(other, value) if is_first else function(value, other)


Ask = Callable[[str, str, Steps], None]


class _Watched:
    """A number that remembers what it was asked, and of which number it was computed."""

    _steps: Steps
    _told: tuple[Ask, str, str]

    def __bool__(self) -> bool:
        self._tell(("bool", None, False))
        return bool(_plain(self))

    def __reduce__(self) -> Any:  # copies are plain numbers
        return type(_plain(self)), (_plain(self),)

    def __copy__(self) -> Any:
        return _plain(self)

    def __deepcopy__(self, memo: object) -> Any:
        return _plain(self)

    def _tell(self, step: tuple[str, Any, bool]) -> None:
        ask, path, name = self._told
        ask(path, name, (*self._steps, step))


class _WatchedInt(_Watched, int):
    __hash__ = int.__hash__


class _WatchedFloat(_Watched, float):
    __hash__ = float.__hash__


def _watched(value: Any, steps: Steps, *told: Any) -> Any:
    kind = {int: _WatchedInt, float: _WatchedFloat}.get(type(value))
    if kind is None:
        return value
    found: Any = kind(value)
    found._steps, found._told = steps, told
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, _WatchedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _WatchedFloat) else value


def _asks(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        other = _plain(other)
        self._tell((name, other, False))
        return getattr(operator, name)(_plain(self), other)

    return method


def _computes(name: str, *, is_first: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        step = name, _plain(other), is_first
        return _watched(_done(_plain(self), step), (*self._steps, step), *self._told)

    return method


for _name in _ASKS:
    setattr(_Watched, f"__{_name}__", _asks(_name))
for _name in _COMPUTES:
    setattr(_Watched, f"__{_name}__", _computes(_name, is_first=False))
    setattr(_Watched, f"__r{_name}__", _computes(_name, is_first=True))
