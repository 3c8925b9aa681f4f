"""Attributes that functions of Python read by their names, in code that nobody can look into.

Examples are ``operator.attrgetter("a.b")(x)``, ``functools.reduce(getattr, names, x)``,
``functools.partial(getattr, x, "a")`` and ``map(getter, objects)``. Each gives places: an object,
which may be unknown, and a name in it.
"""

import functools
import inspect
import itertools
import operator
import re
import string
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .members import ALL, UNKNOWN, Names, attribute_in, is_one_of, member_of

_OF_ATTRIBUTES = (getattr, object.__getattribute__, inspect.getattr_static)
_READERS = (*_OF_ATTRIBUTES, operator.getitem)
_SETTERS = (setattr, delattr, object.__setattr__, object.__delattr__, type.__setattr__)
_MAKERS = (operator.attrgetter, operator.methodcaller, functools.partial)
_HAND_ON = (map, filter, sorted, max, min, itertools.groupby)

_FIRST = re.compile(r"[^.\[]*")  # of a text's field: the argument
_PATH = re.compile(r"\.([^.\[]+)|\[([^\]]+)\]")  # what is read of it: attributes, entries

Place = tuple[Any, Any]


def is_getter(function: Any) -> bool:
    """Return whether a function reads attributes or entries by their names."""
    if type(function) is functools.partial:
        return is_getter(function.func)
    return type(function) is operator.attrgetter or is_one_of(function, _READERS)


def is_setter(function: Any) -> bool:
    """Return whether a function sets attributes by their names."""
    if type(function) is functools.partial:
        return is_setter(function.func)
    return is_one_of(function, _SETTERS)


def set_by(function: Any, args: list[Any]) -> Iterator[Place]:
    """Yield the place that a call of a setter sets, if its name is known."""
    while type(function) is functools.partial:
        function, args = function.func, [*function.args, *args]
    if is_setter(function):
        yield from itertools.islice(_along(args[0], args[1:2]), 1)


def hands_on(function: Any) -> bool:
    """Return whether a function calls what it is given with the members of the rest."""
    return is_one_of(function, _HAND_ON)


def asked_of(function: Any, args: list[Any]) -> Iterator[Place]:
    """Yield the places that a call of a getter, or of ``functools.reduce`` with one, reads."""
    if type(function) is functools.partial:
        yield from asked_of(function.func, [*function.args, *args])
    elif type(function) is operator.attrgetter:
        for path in function.__reduce__()[1]:
            yield from _along(args[0], path.split("."))
    elif is_one_of(function, _OF_ATTRIBUTES):
        yield from _along(args[0], args[1:2])
    elif function is operator.getitem:
        owner, key = args
        yield owner, key if isinstance(owner, dict) and key is not UNKNOWN else ALL
    elif function is functools.reduce and args[0] is getattr and type(args[1]) in (list, tuple):
        path = [*args[2:], *args[1]]  # the object, and names
        yield from _along(path[0], path[1:])


def method_called(function: Any, owner: Any) -> Any:
    """Return the method that ``operator.methodcaller("name")`` calls of an object."""
    made, args = function.__reduce__()
    name = (made.args if type(made) is functools.partial else args)[0]
    found = attribute_in(owner, name)
    return types.MethodType(found, owner) if isinstance(found, types.FunctionType) else found


def asked_by_text(text: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places that ``text.format(*args, **keywords)`` reads: ``"{0.n} {net.d[k]}"``."""
    for numbered, (field, spec) in enumerate(_fields(text)):
        yield from asked_by_text(spec, args, keywords)
        first = _FIRST.match(field)[0] or str(numbered)  # type: ignore[index]
        found = keywords.get(first, UNKNOWN)
        if first.isdecimal():
            found = next(iter(args[int(first) :]), UNKNOWN)
        for name, key in _PATH.findall(field):
            is_known = name or isinstance(found, dict)
            yield found, (name or key) if is_known else ALL
            found = attribute_in(found, name) if name else member_of(found, key)


def _fields(text: Any) -> list[tuple[str, str]]:
    """Return the names and formats of the fields in a text; none if it is not well formed."""
    try:
        parts = [*string.Formatter().parse(text)]
    except (TypeError, ValueError):  # as the user's own will
        return []
    return [(field, spec or "") for _, field, spec, _ in parts if field is not None]


def gives_known(function: Any) -> bool:
    """Return whether :func:`found_by` may tell what a call of a function gives."""
    is_maker = is_one_of(function, _MAKERS)
    return is_maker or function is functools.reduce or is_getter(function)


def found_by(function: Any, args: list[Any]) -> Any:
    """Return the getter that a call makes, or what a call of one finds; ``UNKNOWN`` for others."""
    if is_one_of(function, _MAKERS):
        is_known = all(type(arg) is str for arg in args)
        is_known = is_known or is_getter(args[0]) or is_setter(args[0])
        is_known = is_known or (function is operator.methodcaller and type(args[0]) is str)
        return function(*args) if args and is_known else UNKNOWN
    places = [*asked_of(function, args)]
    for place, (owner, _) in itertools.pairwise(places):
        if owner is UNKNOWN or attribute_in(*place) is not owner:
            return UNKNOWN  # several paths, or the user's code in between
    *_, (owner, key) = places or [(UNKNOWN, UNKNOWN)]
    return member_of(owner, key) if isinstance(owner, dict) else attribute_in(owner, key)


def _along(owner: Any, names: Iterable[Any]) -> Iterator[Place]:
    """Yield the places along a path: ``a`` and ``b`` of ``x.a.b``."""
    for name in names:
        if type(name) is not str:
            return
        yield Names(vars(owner)) if isinstance(owner, types.ModuleType) else owner, name
        found = attribute_in(owner, name)
        owner = UNKNOWN if isinstance(found, property) else found
