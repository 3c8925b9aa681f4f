"""The methods of the user's classes that Python's syntax calls: operators, loops, ``with``, texts.

In a forward they are traced where they run. Of code that does not run, the syntax says which object
is used, and the class says what may be called for that.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...._common.libraries import is_users

# Those that set something, or are called by name, are no reads of the object.
_NO_READS = frozenset(
    [
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__del__"),
        *("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__set__", "__delete__"),
        *("__enter__", "__exit__", "__aenter__", "__aexit__", "__getattr__", "__getattribute__"),
        *("__setstate__", "__reduce__", "__getstate__", "__deepcopy__", "__copy__", "__get__"),
        *("__class_getitem__", "__dir__", "__sizeof__", "__instancecheck__", "__subclasscheck__"),
    ]
)
_BY_NAME = ("__getattr__", "__getattribute__")
_IN_PLACE = "__i"  # __iadd__; but not __iter__, __index__, __int__ and __invert__
_NOT_IN_PLACE = ("__iter__", "__index__", "__int__", "__invert__")


@functools.lru_cache(1_000)
def _protocols_of(kind: Any) -> tuple[types.FunctionType, ...]:
    return tuple(m for base in kind.__mro__ for name, m in vars(base).items() if _reads(name, m))


def protocols_of(value: Any) -> tuple[types.FunctionType, ...]:
    """Return the methods of an object's class, written by the user, that syntax calls to read the
    object."""
    kind: Any = type(value)
    return _protocols_of(kind)


def _reads(name: str, member: Any) -> bool:
    if not isinstance(member, types.FunctionType) or not is_users(member.__module__):
        return False
    is_special = name.startswith("__") and name.endswith("__") and name not in _NO_READS
    is_in_place = name.startswith(_IN_PLACE) and name not in _NOT_IN_PLACE
    return is_special and not is_in_place and member.__qualname__ != "__create_fn__"


def is_read_by_syntax(value: Any) -> bool:
    """Return whether syntax that uses an object may read its attributes."""
    methods = protocols_of(value)
    if isinstance(value, nn.Module):  # it is called, and shown, as any other
        methods = tuple(m for m in methods if m.__name__ not in ("__call__", "__repr__"))
    return bool(methods)


def called_by_with(value: Any) -> Iterator[Callable[..., Any]]:
    """Yield the methods of the user's class that a ``with`` statement calls.

    Args:
        value: the context manager, or its class.
    """
    kind = value if isinstance(value, type) else type(value)
    for name in ("__enter__", "__exit__", "__aenter__", "__aexit__"):
        yield from _users(kind, name)


def called_by_name(
    owner: Any, found: Any, *, is_known: bool
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield what an attribute's name calls, with its first arguments: a descriptor, or a method of
    the object for names that it does not have.

    Args:
        owner: the object.
        found: what its class has there.
        is_known: whether it has anything there.
    """
    if isinstance(found, functools.cached_property):
        yield found.func, (owner,)
    elif isinstance(found, functools.singledispatchmethod):
        yield from ((each, (owner,)) for each in found.dispatcher.registry.values())
    elif is_descriptor(found):
        for method in _users(type(found), "__get__"):
            yield method, (found, owner)
    for name in () if is_known else _BY_NAME:
        for method in _users(type(owner), name):
            yield method, (owner,)


def set_by(found: Any) -> Iterator[types.FunctionType]:
    """Yield the method of the user's that an assignment to a descriptor of a class calls."""
    yield from _users(type(found), "__set__")


def of_entry(owner: Any, *, writes: bool) -> Iterator[types.FunctionType]:
    """Yield the methods of the user's that a subscript calls."""
    for name in ("__setitem__", "__delitem__") if writes else ("__getitem__",):
        yield from _users(type(owner), name)


def makers_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of the user's that a call of a class begins with. They may return an object
    that was there before."""
    yield from _users(type(kind), "__call__")
    yield from _users(kind, "__new__")


def is_descriptor(found: Any) -> bool:
    """Return whether a member of a class stands for a value that its own code returns."""
    is_cached = isinstance(found, functools.cached_property)
    return is_cached or any(True for _ in _users(type(found), "__get__"))


def _users(kind: type, name: str) -> Iterator[types.FunctionType]:
    method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    method = method.__func__ if isinstance(method, staticmethod) else method
    if isinstance(method, types.FunctionType) and is_users(method.__module__):
        yield method
