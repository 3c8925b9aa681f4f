"""Attributes that a recorded forward sets or reads, and on which stages.

A later forward may use one on another stage, in code that no recording shows. Steps watch these
attributes: which stage sets or reads one is known only while it does.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..entries import UsedAttribute
from ..reads import NamesRead
from ..recording import Recording
from .evaluation.members import Names, Registered
from .kinds import held
from .known_values import KnownValues
from .places import attribute_of, in_words, named
from .values import SharedValue, hops_of

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
    for used in _read_by_calls(known, modules, result):
        place = found.setdefault(used.place, used)
        place.read_early |= used.read_early
    for value, others, name in known.each():
        is_list = isinstance(value.key, Registered)  # which members a module has
        # What forwards set, code may read that no recording has met: in a backward.
        is_unused = _is_unread(value, names) and not (is_list or value.set_on)
        if not _has_attributes(value.owner) or is_unused:
            continue
        hops = value.read_on.union(*(other.read_on for other in others))
        numbers = *_early_and_late(hops, value.set_on), value.said_on, value.counted_on
        on = [{*map(result.stage_of, hops_of(some))} for some in numbers]
        if min(set[int]().union(*on), default=0) < 0:
            continue  # on a hop on which nothing runs
        name = in_words(value.owner, None, known.paths) if is_list else name
        key, where = None if is_list else value.key, value.first_read or value.first_write
        used = UsedAttribute(held(value.owner), key, name, where, *on)
        if (same := found.get(used.place)) is not None:
            used.read_early |= same.read_early
        found[used.place] = used
    yield from found.values()


def _early_and_late(read: set[int], written: set[int]) -> Iterator[set[int]]:
    """Yield the hops whose forwards read and set something, and those whose backwards do."""
    for is_late in (False, True):
        for numbers in (read, written):
            yield {hop for hop in numbers if (hop < 0) is is_late}


def _read_by_calls(
    known: KnownValues, modules: Mapping[str, nn.Module], result: Recording
) -> Iterator[UsedAttribute]:
    stages_by_path = defaultdict[str, set[int]](set)
    for call in result.calls:
        stages_by_path[call.path] |= {call.stage, *map(result.stage_of, call.hops)}
    for path, stages in stages_by_path.items():
        if (module := modules.get(path)) is None:
            continue
        # What a library's module reads of itself, nobody sees.
        keys = _READ_BY_CALLS if is_users(type(module).__module__) else (*_READ_BY_CALLS, None)
        for key in keys:
            name = path or "the model" if key is None else named(module, key, known.paths)
            yield UsedAttribute(held(module), key, name, "", {*stages})


def _is_unread(value: SharedValue, names: NamesRead) -> bool:
    """Return whether a value is no attribute, or one that no code reads or counts in."""
    place = attribute_of(value.owner, value.key)
    is_named = not (value.is_read_outside or value.is_unnamed or value.counted_on)
    return place is None or (is_named and names.is_unread(*place))


def _has_attributes(owner: object) -> bool:
    """Return whether an object is a module, or of a class of the user's."""
    is_plain = is_users(type(owner).__module__) and not isinstance(owner, type | Tensor | Names)
    return isinstance(owner, nn.Module) or is_plain
