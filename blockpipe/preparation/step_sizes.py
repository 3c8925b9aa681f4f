"""The sizes of the micro-batches of a pipeline's latest step, by which the next one may run on
lanes.

Some forwards set plain values that follow from sizes, and read them on other stages. While all
micro-batches have one size, such a value stays what it is. In a step with other sizes each one goes
out and comes back before the next, as in the plain loop. To record for each size that comes, as for
each mode, would be slow: batches and sequences have many lengths.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._common.nested import tensors
from ..batches.microbatch import Microbatch
from ..recording.recording import Recording

MOST_SIZES = 8  # that have a recording of their own: a guess


def sizes_of(batch: Microbatch) -> tuple[Any, ...]:
    """Return the shapes of the tensors in a micro-batch's arguments."""
    return tuple(tensor.shape for tensor in tensors((batch.args, batch.kwargs)))


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
        if not (recording.settles or recording.turns_by_size):
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
