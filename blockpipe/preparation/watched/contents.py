"""The content of a value, as something that can be compared and kept as a key.

Two containers or objects with the same content are the same to code that reads them: a dictionary
that a training loop makes anew for each step makes no other recording.
"""

from __future__ import annotations

import array
import contextvars
import enum
import functools
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.libraries import is_users
from ...restoring.holders import attributes_of, content_of_cell
from ...restoring.model_state import slot_members

_MOST_MEMBERS = 1_000  # of a container; a larger one is compared by its identity and its length
MOST_BYTES = 65_536  # of an array, likewise
_MOST_OBJECTS = 20_000
_MOST_NESTED = 30
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OPAQUE = (nn.Module, types.ModuleType, torch.Generator)  # code reads them as they are
_FIXED = (*_OPAQUE, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)
_NOTHING = None, "unset"  # what a context variable without a value says
_CUT_OFF = ("nested", 0)  # in the place of what contains itself


class _Same:
    """An object itself, whatever it says it is equal to."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value  # alive, so that no other one gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _SameAlive:
    """The same, for a key that outlives what it is compared by, and keeps no module alive."""

    __slots__ = ("_number", "_value")

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # most of those are small
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameAlive) or other._number != self._number:
            return False
        value = self._value()
        return value is not None and other._value() is value

    def __hash__(self) -> int:
        return self._number


class Contents:
    """The contents of values, as far as code reads them.

    Args:
        names: the names that the code mentions: it reads no other attributes of objects; ``None``:
            it may read any.
        data: what tensors and arrays are compared by, if not by what they are. With it, contents
            keep no object alive that is compared by its identity.
    """

    def __init__(
        self, names: frozenset[str] | None, data: Callable[[Any], Hashable] | None = None
    ) -> None:
        self._names = names
        self._data = data
        self._same: Callable[[Any], Hashable] = _Same if data is None else _SameAlive
        self._found: dict[int, Any] = {}  # by the id of an object, which the caller keeps alive
        self._depth = 0

    def forget(self) -> None:
        """Begin a new comparison: the objects may have changed since."""
        self._found.clear()

    def of(self, value: Any) -> Hashable:
        """Return a value's content."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value  # 1 is no True, and no 1.0
        if isinstance(value, type | enum.Enum):
            return value
        if isinstance(value, _OPAQUE):
            return self._same(value)
        if self._data is not None and is_data(value):
            return self._data(value)
        if isinstance(value, Tensor) and not attributes_of(value):
            return self._same(value)
        found: Hashable = self._found.get(id(value))
        if found is None:
            if self._depth > _MOST_NESTED or len(self._found) > _MOST_OBJECTS:
                return self._same(value)
            self._found[id(value)] = _CUT_OFF
            self._depth += 1
            try:
                found = self._found[id(value)] = self._looked_into(value, kind)
            finally:
                self._depth -= 1
        return found

    def _looked_into(self, value: Any, kind: type) -> Hashable:
        if isinstance(value, int | float | complex | str | bytes):
            base = next(base for base in kind.__mro__ if base in _PLAIN)
            return kind, base(value), self._attributes(value)
        if isinstance(value, _CONTAINERS):
            return kind, self._members(value), self._attributes(value)
        if kind is types.MappingProxyType:
            return kind, self._members(dict(value))
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            return kind, self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return kind, self.of(value.func), self._each(value.args), self.of(value.keywords)
        if isinstance(value, Tensor):  # code reads its values as they are, but for attributes
            return self._same(value), self._named(attributes_of(value))
        if isinstance(value, contextvars.ContextVar | threading.local | logging.Logger):
            return self._of_surroundings(value)
        if kind is slice:
            return kind, self._each((value.start, value.stop, value.step))
        if isinstance(value, weakref.ref):
            return kind, self.of(value())
        if isinstance(value, weakref.WeakValueDictionary):
            return kind, self._members(dict(value))
        if isinstance(value, bytearray | array.array) and memoryview(value).nbytes <= MOST_BYTES:
            return kind, bytes(value), getattr(value, "typecode", "")
        if is_data(value):
            if value.nbytes > MOST_BYTES:
                return self._same(value)
            return kind, str(value.dtype), value.shape, value.tobytes()
        if _has_attributes(kind):
            return kind, self._attributes(value)
        return (kind, value) if _is_a_value(value) else self._same(value)

    def _of_surroundings(self, value: Any) -> Hashable:
        """Return what an object of the standard library says in this thread."""
        if isinstance(value, contextvars.ContextVar):
            return self._same(value), self.of(value.get(_NOTHING))
        if isinstance(value, threading.local):
            return self._same(value), self._named(vars(value))
        return self._same(value), value.getEffectiveLevel(), value.disabled, value.manager.disable

    def _members(self, value: Any) -> Hashable:
        kind = next(one for one in _CONTAINERS if isinstance(value, one))  # past its own methods
        if (count := kind.__len__(value)) > _MOST_MEMBERS:
            return self._same(value), count
        if isinstance(value, dict):
            return self._each(dict.keys(value)), self._each(dict.values(value))
        found = self._each(kind.__iter__(value))
        return frozenset(found) if isinstance(value, set | frozenset) else found

    def _each(self, values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple([self.of(value) for value in values])

    def _function(self, function: types.FunctionType) -> Hashable:
        if not is_users(function.__module__):
            return self._same(function)
        cells = map(content_of_cell, function.__closure__ or ())
        given = function.__defaults__, function.__kwdefaults__, function.__dict__
        return function.__code__, self._each(cells), self._each(given)

    def _attributes(self, value: Any) -> Hashable:
        own = attributes_of(value)
        found = [*own.items()] if isinstance(own, dict) else []
        if type(value).__module__ != "builtins":
            for slot in slot_members(type(value)):
                found += [(slot.__name__, slot.__get__(value))] if _is_set(slot, value) else []
        return self._named(dict(found))

    def _named(self, found: dict[str, Any]) -> tuple[Hashable, ...]:
        names = self._names
        return tuple([(k, self.of(v)) for k, v in found.items() if names is None or k in names])


def is_data(value: Any) -> bool:
    """Whether a value is a tensor, or one of numpy's arrays."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def is_fixed(value: Any) -> bool:
    """Return whether a value's content is the same as long as it is the same object."""
    return type(value) in _PLAIN or isinstance(value, _FIXED)


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _is_a_value(value: Any) -> bool:
    """Whether an object is what it stands for: fractions, dates, dtypes, numpy's numbers."""
    try:
        hash(value)
    except (TypeError, ValueError):  # of a memoryview of what may be written
        return False
    return True


@functools.lru_cache(1_000)
def _has_attributes(kind: type) -> bool:
    """Whether code may set attributes of such an object, and read them again."""
    package = str(kind.__module__).partition(".")[0]
    if issubclass(kind, torch.optim.Optimizer):  # it has the learning rates
        return True
    if package in ("builtins", "torch", "numpy", __name__.partition(".")[0]):
        return False
    return package not in sys.stdlib_module_names or package == "__main__" or kind.__hash__ is None
