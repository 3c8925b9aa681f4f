"""Notice which arrays and bytes a step has written to.

Their content is no reason for a branch that anybody could compare in each step. But a forward may
write to one now and then, where another stage reads it.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from ...restoring.contents import content_of
from ...restoring.holders import ContentHolder, DictHolder, Holder, SequenceHolder
from .reading import size_of

_MOST_BYTES, _MOST_ARRAYS = 1 << 16, 256  # of one, and how many: guesses


class WrittenArrays:
    """The arrays that a model's forwards may reach.

    Args:
        holders: of the objects that hold them.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        few = (holder for holder in holders if not _is_large(holder))
        members = (member for holder in few for _, member in holder.now())
        found = {id(one): one for one in members if 0 <= _size(one) <= _MOST_BYTES}
        self._arrays = [*found.values()][:_MOST_ARRAYS]
        self._then = list[int]()

    def step_begins(self) -> None:
        """Note what is in them now."""
        self._then = [*map(_digest, self._arrays)]

    def written(self) -> Iterator[ContentHolder]:
        """Yield holders of those with another content than when the step began."""
        for one, then in zip(self._arrays, self._then, strict=False):
            if _digest(one) != then and (holder := content_of(one)) is not None:
                yield holder


def _is_large(holder: Holder) -> bool:
    """Whether an object is a container of more members than arrays are looked at: a data set."""
    is_container = isinstance(holder, DictHolder | SequenceHolder)
    return is_container and size_of(holder) > _MOST_ARRAYS


def _size(value: Any) -> int:
    """Return the number of an array's bytes; below zero for other objects."""
    if isinstance(value, bytearray):
        return len(value)
    if isinstance(value, array):
        return len(value) * value.itemsize
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return int(value.nbytes) if is_array and not value.dtype.hasobject else -1


def _digest(value: Any) -> int:
    content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
    return hash((content, getattr(value, "shape", None)))
