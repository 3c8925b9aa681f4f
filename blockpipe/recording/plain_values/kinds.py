"""What is at a place but the tensors themselves: that there is one, or none, so many of them in a
container, and the plain values beside them.

Tensors that one stage leaves for another say which micro-batch they are of, if an operation is
given them. ``self.mask is None``, ``len(self.found)`` and ``"mask" in self.found`` give it none. A
recording sees one kind of value, or two. So steps look whether all micro-batches leave the same.
"""

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor

from ..entries import TurningValue
from ..reads import NamesRead, libraries_code_reads
from .arrays import is_array
from .evaluation.members import ALL, UNKNOWN, ClassNames, Names, member_of
from .known_values import KnownValues
from .places import attribute_of, space_of
from .values import hops_of

_CONTAINERS = (list, tuple, dict, set, str)


def turning_values(
    known: KnownValues, names: NamesRead, first: Container[int]
) -> Iterator[TurningValue]:
    """Yield the places of a recorded forward that one hop writes to and another one reads.

    Args:
        known: the values that the forward has read and set, at its end.
        names: the names that the user's code reads.
        first: the ids of the objects that were there before.
    """
    for value, others, name in known.each():
        if not (isinstance(value.owner, Names | type) or space_of(value.owner) in first):
            continue  # each micro-batch makes its own
        place = attribute_of(value.owner, value.key)
        is_named = not (value.is_read_outside or value.is_unnamed)
        if place is not None and is_named and names.is_unread(*place):
            continue
        writes = {hop for hop in value.written_on if hop >= 0}
        reads = value.read_on.union(*(other.read_on for other in others))
        if writes and len(writes | {hop for hop in reads if hop >= 0}) > 1 and reads:
            where = next(each.first_read for each in (value, *others) if each.first_read)
            # A stage in between may complete an object that it finds there.
            looks = writes | {hop for hop in reads if hop > min(writes)}
            yield TurningValue(held(value.owner), value.key, name, where, hops_of(looks))


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


def held(owner: Any) -> Callable[[], Any]:
    """Return what gives an object, without keeping it alive where that is possible."""
    if isinstance(owner, ClassNames):
        owner = owner.kind
    if is_array(owner) or isinstance(owner, Names):
        return lambda: owner  # with a weak reference an array cannot be resized; names are ours
    try:
        return weakref.ref(owner)  # a recording holds no module
    except TypeError:  # a dictionary, a list
        return lambda: owner


def value_at(place: TurningValue) -> Any:
    """Return what is at a place now."""
    owner = place.object
    return owner if place.key is ALL or owner is None else member_of(owner, place.key)


def in_words(value: Any) -> str:
    """Return a value for a message."""
    if value is UNKNOWN:
        return "nothing"
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, bool | int | float | complex | None):
        return repr(value)
    name = f"a {type(value).__name__}"
    return f"{name} of {len(value)}" if isinstance(value, _CONTAINERS) else name
