"""Read the members of many objects before each step, by loops that Python runs in C."""

import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from ...restoring.holders import (
    ClassHolder,
    DictHolder,
    Holder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
)
from .seen import MOST_IN_ORDER, Code, is_plain, seen

_Read = tuple[Callable[[Any], tuple[Any, ...]], Any]  # a function, and what it reads from
_NOTHING: _Read = (tuple, ())
_PLAIN_SPACES = frozenset([dict, OrderedDict, list, deque, types.MappingProxyType])


class Values(NamedTuple):
    """What many objects have, or one of them.

    Attributes:
        sizes: how many names or members those have that may get others.
        objects: values that are the same as long as they are one object.
        looked_at: what is seen of others.
    """

    sizes: Any
    objects: Any
    looked_at: Any


class MemberReads:
    """The reading of many objects."""

    def __init__(self) -> None:
        self._sized: list[Any] = []
        self._objects: list[_Read] = []
        self._looked_at: list[_Read] = []

    def add(self, holder: Holder, members: dict[Hashable, Any]) -> None:
        """Read one more object.

        Args:
            holder: of the object.
            members: what is seen of it, by the names that are read.
        """
        space = plain_space(holder)
        may_grow = space is not None and (has_names(holder) or isinstance(holder, SequenceHolder))
        self._sized.append(space if may_grow else ())
        self._objects.append(_NOTHING)
        self._looked_at.append(_NOTHING)
        self.read_again(-1, holder, members)

    def read_again(self, index: int, holder: Holder, members: dict[Hashable, Any]) -> None:
        """Read other names of an object."""
        looked_at = looked_at_in(members)
        known = set(looked_at)  # a list would compare keys that are tensors by their values
        others = [key for key in members if key not in known]
        self._objects[index], self._looked_at[index] = _readers(holder, others, looked_at)

    def size(self, index: int) -> int:
        """Return how many names or members an object has that may get others; else 0."""
        return len(self._sized[index])

    def now(self) -> Values:
        """Return what the objects have now.

        Raises:
            LookupError: a name is no longer there.
        """
        return Values(
            [*map(len, self._sized)],
            [read(space) for read, space in self._objects],
            [read(space) for read, space in self._looked_at],
        )


def are_same(now: Values, then: Values) -> bool:
    """Whether all objects have as many names as before, with the same values."""
    return (
        now.sizes == then.sizes
        and [*map(len, now.objects)] == [*map(len, then.objects)]
        and all(map(is_, chain.from_iterable(now.objects), chain.from_iterable(then.objects)))
        and now.looked_at == then.looked_at
    )


def which_are_same(now: Values, then: Values) -> list[bool]:
    """Return, for each object, whether it has as many names as before, with the same values."""
    pairs = zip(zip(*now, strict=True), zip(*then, strict=True), strict=True)
    return [_is_same(Values(*one), Values(*other)) for one, other in pairs]


def _is_same(now: Values, then: Values) -> bool:
    if now.sizes != then.sizes or len(now.objects) != len(then.objects):
        return False
    is_same = all(map(is_, now.objects, then.objects))
    return is_same and bool(now.looked_at == then.looked_at)


def plain_space(holder: Holder) -> Any:
    """Return an object's namespace, if reading a name there runs no code: a class of dictionaries
    may have methods of its own for that."""
    space = holder.namespace()
    return space if type(space) in _PLAIN_SPACES else None


def size_of(holder: Holder) -> int:
    """Return how many members a container has, whatever its class says."""
    container: Any = holder.namespace()
    kind = next(kind for kind in (dict, list, deque) if isinstance(container, kind))
    return int(kind.__len__(container))


def has_names(holder: Holder) -> bool:
    """Whether other names may be added to an object between steps."""
    return isinstance(holder, DictHolder | ClassHolder | SlotsHolder)


def looked_at_in(members: dict[Hashable, Any]) -> list[Hashable]:
    """Return the names of values of which another part may be seen although they are the same."""
    return [key for key, value in members.items() if isinstance(value, Code)]


def frozen(holder: Holder) -> frozenset[Any] | None:
    """Return the members of a small set of plain values; ``None`` for any other set."""
    members = [member for _, member in holder.now()]
    few = len(members) <= MOST_IN_ORDER
    return frozenset(members) if few and all(map(is_plain, members)) else None


def _readers(
    holder: Holder, others: list[Hashable], looked_at: list[Hashable]
) -> tuple[_Read, _Read]:
    space = plain_space(holder)
    if isinstance(holder, SetHolder):
        return _NOTHING, (lambda holder: (frozen(holder),), holder)
    if space is not None:
        plain = (_getter(others), space) if others else _NOTHING
        if not looked_at:
            return plain, _NOTHING
        get = _getter(looked_at)
        return plain, (lambda space: tuple(map(seen, get(space))), space)
    if isinstance(holder, SlotsHolder) and not looked_at:
        return (lambda holder: tuple(chain.from_iterable(holder.now())), holder), _NOTHING

    def of_others(holder: Holder) -> tuple[Any, ...]:
        found = dict(holder.now())
        return (*found, *map(found.__getitem__, others))

    def of_looked_at(holder: Holder) -> tuple[Any, ...]:
        return tuple(map(seen, map(dict(holder.now()).__getitem__, looked_at)))

    return (of_others, holder), (of_looked_at, holder)


def _getter(keys: list[Hashable]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads names from a namespace."""
    return operator.itemgetter(*keys, keys[0])  # one key twice, for a tuple even of one
