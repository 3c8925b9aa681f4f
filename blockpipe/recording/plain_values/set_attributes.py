"""Attributes that a recorded forward reads on some stages, and the stages that set them.

A later forward may set one on another stage, in code that no recording shows. Steps watch these
attributes: which stage sets one is known only while it is set.
"""

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..calls import hops_by_path
from ..entries import SetAttribute
from ..reads import NamesRead
from ..recording import Recording
from .evaluation.members import Names
from .known_values import KnownValues
from .places import attribute_of, named
from .values import hops_of

_MODE = "training"


def set_attributes(
    known: KnownValues, names: NamesRead, modules: Mapping[str, nn.Module], result: Recording
) -> Iterator[SetAttribute]:
    """Yield the attributes that a forward reads, and the modes of the modules that it calls.

    Args:
        known: the values that it has read and set, at its end.
        names: the names that the user's code reads.
        modules: the model's modules, by path.
        result: the recording, with its hops and calls.
    """
    found = dict[tuple[int, str], SetAttribute]()
    for path, hops in hops_by_path(result.calls).items():
        if (module := modules.get(path)) is not None:
            name, stages = named(module, _MODE, known.paths), {*map(result.stage_of, hops)}
            found[id(module), _MODE] = SetAttribute(name, "", weakref.ref(module), _MODE, stages)
    for value, others, name in known.each():
        owner, key = value.owner, value.key
        if not _has_attributes(owner) or (place := attribute_of(owner, key)) is None:
            continue
        reads = value.read_on.union(*(other.read_on for other in others))
        is_named = not (value.is_read_outside or value.is_unnamed)
        if not reads or (is_named and names.is_unread(*place)):
            continue
        sets = {*map(result.stage_of, hops_of(value.set_on))}
        stages = {*map(result.stage_of, hops_of(reads | value.counted_on))} | sets
        try:
            held = weakref.ref(owner)  # a recording holds no module
        except TypeError:
            continue
        new = SetAttribute(name, value.first_read, held, key, stages, sets)
        if (same := found.get((id(owner), key))) is not None:
            new.used_on |= same.used_on
        found[id(owner), key] = new
    yield from found.values()


def _has_attributes(owner: object) -> bool:
    """Return whether an object is a module, or of a class of the user's."""
    is_plain = is_users(type(owner).__module__) and not isinstance(owner, type | Tensor | Names)
    return isinstance(owner, nn.Module) or is_plain
