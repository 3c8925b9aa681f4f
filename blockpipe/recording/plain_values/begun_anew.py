"""Values that code beside the forward sets, such as a hook, and those of them that each forward
begins anew: a list which it empties and a hook fills, a count that it sets back.

A hook does not run in a recording, so that the forward seems to set what was there before, which
counts as no change. In a step the hook comes between two forwards; where several micro-batches are
under way, it comes behind both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .evaluation.members import member_of
from .places import space_of
from .values import SharedValue


def note_begun(
    values: Mapping[tuple[int, Any], SharedValue],
    overlapping: Callable[[SharedValue], list[SharedValue]],
) -> None:
    """Note, at the end of a forward, that it sets such values.

    Args:
        values: all that is known, by the place.
        overlapping: returns the values that overlap with one.
    """
    begun = [value for value in values.values() if value.begun_on]
    if not any(value.beside_on for value in values.values()):
        for known in begun:
            known.begun_on = {}
        return
    by_space = defaultdict[int, list[SharedValue]](list)
    for (space, _), value in values.items():
        by_space[space].append(value)
    for known in begun:
        inside = by_space.get(space_of(member_of(known.owner, known.key)), [])
        updated, used = dict[int, str](), set[int]()
        for same in ([known, *overlapping(known)], inside):
            updated.update(line for one in same for line in one.updated_on.items())
            beside = set[int]().union(*(one.beside_on for one in same))
            used |= beside & set[int]().union(*(one.read_on for one in same))
        used |= {*updated}
        known.begun_on = {h: at for h, at in known.begun_on.items() if h >= 0 and used - {h}}
        known.set_on |= {*known.begun_on}
        for hop, line in updated.items() if known.begun_on else ():
            known.is_read(hop, line)


def set_beside(values: Iterable[SharedValue]) -> set[tuple[int, Any]]:
    """Return the places that code beside the forward sets: ids with keys, of a content ``None``."""
    return {value.place for value in values if value.beside_on}
