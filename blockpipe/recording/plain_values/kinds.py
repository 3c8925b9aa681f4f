"""What is at a place but the tensors themselves: that there is one, or none, so many of them in a
container, and the plain values beside them.

Tensors that one stage leaves for another say which micro-batch they are of, if an operation is
given them. ``self.mask is None``, ``len(self.found)`` and ``"mask" in self.found`` give it none. A
recording sees one kind of value, or two. So steps look whether all micro-batches leave the same.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn

from ..entries import TurningValue
from ..reads import NamesRead, libraries_code_reads
from .evaluation.members import ALL, UNKNOWN, member_of
from .known_values import KnownValues
from .places import attribute_of, has_tensors
from .values import hops_of

_MOST_MEMBERS = 256  # of a container; a larger one counts by its length
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, deque, Set)


def turning_values(known: KnownValues, names: NamesRead) -> Iterator[TurningValue]:
    """Yield the places of a recorded forward that one hop writes to and another one reads.

    Args:
        known: the values that the forward has read and set, at its end.
        names: the names that the user's code reads.
    """
    for value, others, name in known.each():
        place = attribute_of(value.owner, value.key)
        if place is not None and not value.is_read_outside and names.is_unread(*place):
            continue
        writes = {hop for hop in value.written_on if hop >= 0}
        reads = value.read_on.union(*(other.read_on for other in others))
        if writes and len(writes | {hop for hop in reads if hop >= 0}) > 1 and reads:
            where = next(each.first_read for each in (value, *others) if each.first_read)
            yield TurningValue(name, where, hops_of(writes), _held(value.owner), value.key)


def traced_on(known: KnownValues, owner: Any, key: Any) -> set[int] | None:
    """Return the hops on which traced code reads what it sets at a place; ``None`` where other
    code may do either.

    Args:
        known: the values that the forward has read and set, at its end.
        owner: the object.
        key: the name or key in it.
    """
    value = known.found_at(owner, key)
    if value is None or not value.is_traced or libraries_code_reads(type(owner), key):
        return None
    return value.read_on


def left_bare(known: KnownValues) -> set[str]:
    """Return the names of places at which a forward has left what carries no tensors, and where it
    may leave one."""
    return {
        name
        for value, _, name in known.each()
        if value.is_bare and not has_tensors(member_of(value.owner, value.key))
    }


def _held(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)  # a recording holds no module
    except TypeError:  # a dictionary, a list
        return lambda: owner


def kind_of(value: TurningValue) -> Hashable:
    """Return the kind of what is at a place, to be compared with another micro-batch's."""
    owner = None if value.owner is None else value.owner()
    if owner is None:
        return None
    return _kind(owner if value.key is ALL else member_of(owner, value.key), 0)


def in_words(kind: Hashable) -> str:
    """Return a kind for a message."""
    name, inside = kind if isinstance(kind, tuple) else (kind, None)
    return str(name) if inside is None else f"{name} of {len(inside)}"


def _kind(value: Any, depth: int) -> Hashable:
    if value is UNKNOWN:
        return "nothing"
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, _PLAIN):
        return repr(value)
    name = f"a {type(value).__name__}"
    members: Any = None
    if isinstance(value, Mapping):
        members = dict(value)
    elif isinstance(value, _CONTAINERS):
        members = dict(enumerate(value)) if not isinstance(value, Set) else dict.fromkeys(value)
    elif not isinstance(value, nn.Module | type) and has_tensors(value):
        members = vars(value)
    if members is None or depth > 2:
        return name
    if len(members) > _MOST_MEMBERS:
        return name, (len(members),)
    return name, tuple((_key(key), _kind(inner, depth + 1)) for key, inner in members.items())


def _key(key: Any) -> Hashable:
    return key if isinstance(key, str | int | bool | float | tuple | None) else id(key)
