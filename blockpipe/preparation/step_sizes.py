"""The sizes of the micro-batches of a pipeline's latest step, by which the next one may run on
lanes.

Some forwards set plain values that follow from sizes, and read them on other stages. While all
micro-batches have one size, such a value stays what it is. In a step with other sizes each one goes
out and comes back before the next, as in the plain loop. To record for each size that comes, as for
each mode, would be slow: batches and sequences have many lengths.

Lists of lengths or texts, and all other arguments without tensors, count as sizes here: a forward
sees them in a recording too, on fake tensors, and each micro-batch may have other ones.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._common.nested import members
from ..batches.microbatch import Microbatch
from ..recording.recording import Recording

MOST_SIZES = 8  # that have a recording of their own: a guess


def asks_sizes(recording: Recording) -> bool:
    """Return whether a step by a recording depends on the sizes of its micro-batches."""
    return recording.settles or bool(recording.turns_by_size)


def sizes_of(batch: Microbatch) -> tuple[Any, ...]:
    """Return what a recording on fake tensors sees of a micro-batch's arguments: the shapes of
    tensors, plain values, how they are nested, and of all other objects which ones they are."""
    return _sizes_in(batch.args), _sizes_in(batch.kwargs)


def _sizes_in(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value) if value.is_nested else value.shape  # one that is nested has no shape
    found = members(value)
    if found is not None:
        return tuple((name, _sizes_in(item)) for name, item in found)
    # Kept, an object would hold what it has of its step. Whether it is equal nobody can say.
    return type(value), value if is_plain(value) else id(value)


def is_plain(value: Any) -> bool:
    """Return whether a value of an argument is known by its content."""
    return isinstance(value, bool | int | float | str | None)


@dataclass
class StepSizes:
    """What a pipeline knows of its latest step, whatever recording that ran by.

    Attributes:
        latest: the sizes of its micro-batches; empty while it runs, and if it has failed; ``None``
            before the first step that they matter to.
    """

    latest: frozenset[Hashable] | None = None

    def unsettled(
        self, recording: Recording, microbatches: Sequence[Microbatch]
    ) -> frozenset[Hashable] | None:
        """Return the sizes of a step's micro-batches, if these may set, or make anew, what other
        hops read of earlier ones; ``None`` if they do not.

        Args:
            recording: the recording that the step runs by.
            microbatches: its micro-batches.
        """
        if not asks_sizes(recording):
            return None
        sizes = frozenset[Hashable](map(sizes_of, microbatches))
        latest = self.latest
        if latest is None and not recording.settles:
            latest = frozenset([recording.sizes])
        is_known = len(sizes) == 1 and sizes == latest
        if recording.turns_by_size:
            is_known = is_known and recording.sizes in sizes
        return None if is_known else sizes

    def is_new(self, sizes: Hashable, recording: Recording, known: Iterable[Any]) -> bool:
        """Return whether a size has come so steadily that it gets a recording of its own.

        Args:
            sizes: the sizes of a micro-batch.
            recording: the one that fits otherwise.
            known: the keys of those that there are; their last part is a size that has one.
        """
        is_other = bool(recording.turns_by_size) and recording.sizes != sizes
        is_steady = self.latest == frozenset([sizes])
        return is_other and is_steady and sum(key[-1] is not None for key in known) < MOST_SIZES
