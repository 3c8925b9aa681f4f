"""Copies of the iterators that a forward advances, and of contexts: a recording uses them, because
neither can be set back.

A copy shares nothing that advances with its original, neither the iterators that it reads from nor
the values that it has stored. A generator cannot be copied, so its stand-in raises an error as soon
as it is advanced, and the generator stays where it was. A context, whose variables nobody can take
away again, is copied as well.
"""

import functools
import io
import types
import warnings
from collections.abc import Iterator
from contextvars import Context
from typing import Any, NoReturn

from .._common.callsite import users_line
from .._common.libraries import is_mock
from ..errors import RecordingError

_MODULES = frozenset(["builtins", "itertools", "_collections", "array"])
BOUND = (types.MethodWrapperType, types.BuiltinMethodType)  # methods of C, to their objects
_ADVANCES = frozenset(["_sre", "_queue", "sqlite3"])  # modules of C: calls advance their objects


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's own iterators, a generator, one of a ``DataLoader``, or another
    one without attributes. An iterator of a user's class has some, which can be restored, and a
    file has a position."""
    kind = type(value)
    if is_mock(value) or not hasattr(kind, "__next__"):
        return False
    if kind.__module__ in _MODULES or is_of_loader(value):
        return True
    return not isinstance(value, io.IOBase) and not _has_attributes(value)


def advances(value: Any) -> bool:
    """Whether it is such an iterator, or stands for one that cannot be copied."""
    return is_iterator(value) or isinstance(value, _refusing)


def is_of_loader(value: Any) -> bool:
    """Whether it is an iterator of a ``DataLoader``."""
    return type(value).__module__.startswith("torch.utils.data.")


def _has_attributes(value: Any) -> bool:
    slots = any("__slots__" in vars(base) for base in type(value).__mro__)
    return slots or hasattr(value, "__dict__")


def bound_iterator(value: Any) -> Any:
    """Return the iterator that a method is bound to (``itertools.count().__next__``), or
    ``None``."""
    owner = value.__self__ if isinstance(value, BOUND) else None
    return owner if is_iterator(owner) else None


def _is_advanced(owner: Any) -> bool:
    return type(owner).__module__ in _ADVANCES


class StandIns:
    """The stand-ins for iterators while a forward is recorded. Each iterator has one, even if
    several objects hold it."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}  # by the original's id; callers keep the original alive

    def of(self, value: Any, key: Any = None, owner: Any = None) -> Any:
        """Return the stand-in for a value, which is the value itself unless it holds an iterator.

        Args:
            value: the value.
            key: by which name, if it is one, its owner holds it, for messages.
            owner: the object that holds it.
        """
        kind = type(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            members = [self.of(member, key, owner) for member in value]
            if all(a is b for a, b in zip(members, value, strict=True)):
                return value
            return tuple.__new__(kind, members)
        if kind is functools.partial:
            function, args = self.of(value.func), self.of(value.args)
            if function is value.func and args is value.args:
                return value
            return functools.partial(function, *args, **value.keywords)
        if (iterator := bound_iterator(value)) is not None:
            return getattr(self.of(iterator, key, owner), value.__name__)
        if isinstance(value, Context):
            return self._made.setdefault(id(value), value.copy())
        if not is_iterator(value):
            return value
        if id(value) not in self._made:
            held = f" ({key!r} of {type(owner).__name__})" if isinstance(key, str) else ""
            self._made[id(value)] = self._made_for(value, held)
        return self._made[id(value)]

    def _made_for(self, iterator: Any, held: str) -> Any:
        if isinstance(iterator, types.GeneratorType):
            is_suspended = iterator.gi_frame is not None and not iterator.gi_running
            code = iterator.gi_code
            what = f"{iterator.__qualname__}{held} ({code.co_filename}:{code.co_firstlineno})"
            return _refusing(f"the generator {what}") if is_suspended else iterator
        refused = _refusing(f"an iterator, {type(iterator).__qualname__}{held}")
        if "__reduce__" not in {n for base in type(iterator).__mro__[:-1] for n in vars(base)}:
            # As of csv.reader(): object.__reduce__ would make an empty one.
            return refused
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # in Python 3.12
                make, args, *state = iterator.__reduce__()
        except Exception:  # such iterators cannot be copied, or its dictionary has changed
            return refused
        if any(isinstance(one, BOUND) and _is_advanced(one.__self__) for one in args):
            return refused  # as of re.finditer()
        copy = make(*self.of(args))
        if state and state[0] is not None:
            copy.__setstate__(self._state(state[0]))
        return copy

    def _state(self, state: Any) -> Any:
        """Return a copy of an iterator's state: ``cycle`` goes on adding to the list in it."""
        if isinstance(state, tuple):
            return tuple(self._state(member) for member in state)
        return list(state) if isinstance(state, list) else self.of(state)


class _refusing:  # noqa: N801 - a value that reads as a participle
    """Return a stand-in that raises an error however it is advanced."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __iter__(self) -> Iterator[NoReturn]:
        return self

    def __next__(self) -> NoReturn:
        _refuse(self._what)

    def send(self, value: object) -> NoReturn:
        _refuse(self._what)

    def throw(self, *error: object) -> NoReturn:
        _refuse(self._what)

    def close(self) -> NoReturn:
        _refuse(self._what)


_refusing.__name__ = _refusing.__qualname__ = "iterator"  # in errors


def _refuse(what: str) -> NoReturn:
    raise RecordingError(
        f"a recording runs the forward once more and leaves no trace, but this forward advances "
        f"{what}, which can be neither copied nor put back, at {users_line()}; count in an "
        "attribute of the model and compute the value from that, or pass the value to the forward "
        "as an argument"
    )
