"""Attributes that a recorded forward sets or reads, and on which stages.

A later forward may use one on another stage, in code that no recording shows. Steps watch these
attributes: which stage sets or reads one is known only while it does.
"""

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..entries import UsedAttribute
from ..reads import NamesRead
from ..recording import Recording
from .evaluation.members import Names
from .known_values import KnownValues
from .places import attribute_of, named
from .values import hops_of

_READ_BY_CALLS = ("training", "forward")  # of a module


def used_attributes(
    known: KnownValues, names: NamesRead, modules: Mapping[str, nn.Module], result: Recording
) -> Iterator[UsedAttribute]:
    """Yield the attributes that a forward sets or reads, and what calls read of modules.

    Args:
        known: the values that it has read and set, at its end.
        names: the names that the user's code reads.
        modules: the model's modules, by path.
        result: the recording, with its hops and calls.
    """
    found = dict[tuple[int, str | None], UsedAttribute]()
    for call in result.calls:
        if (module := modules.get(call.path)) is None:
            continue
        # What a library's module reads of itself, nobody sees.
        keys = _READ_BY_CALLS if is_users(type(module).__module__) else (*_READ_BY_CALLS, None)
        for key in keys:
            name = call.path or "the model" if key is None else named(module, key, known.paths)
            used = UsedAttribute(name, "", weakref.ref(module), key)
            used = found.setdefault((id(module), key), used)
            used.read_on |= {call.stage, *map(result.stage_of, call.hops)}
    for value, others, name in known.each():
        owner, key = value.owner, value.key
        if not _has_attributes(owner) or (place := attribute_of(owner, key)) is None:
            continue
        is_named = not (value.is_read_outside or value.is_unnamed)
        if is_named and names.is_unread(*place):
            continue
        hops = value.read_on.union(*(other.read_on for other in others))
        read_on = {*map(result.stage_of, hops_of(hops))}
        set_on = {*map(result.stage_of, hops_of(value.set_on))}
        if min(read_on | set_on, default=0) < 0:
            continue  # on a hop on which nothing runs
        try:
            held = weakref.ref(owner)  # a recording holds no module
        except TypeError:
            continue
        where = value.first_read or value.first_write
        said_on = {*map(result.stage_of, hops_of(value.said_on))}
        new = UsedAttribute(name, where, held, key, read_on, set_on, said_on)
        if (same := found.get((id(owner), key))) is not None:
            new.read_on |= same.read_on
        found[id(owner), key] = new
    yield from found.values()


def _has_attributes(owner: object) -> bool:
    """Return whether an object is a module, or of a class of the user's."""
    is_plain = is_users(type(owner).__module__) and not isinstance(owner, type | Tensor | Names)
    return isinstance(owner, nn.Module) or is_plain
