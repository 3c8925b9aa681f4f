"""What a step has noticed while it ran, for those who look again after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..._common.coverage.uncovered_code import CodeReached


class StepNotes(NamedTuple):
    """What a step has noticed.

    Attributes:
        written: the tensors that it was the first to write to, by name, with the hops that read
            them.
        reached: the code that no recording has run, by micro-batch.
        mixes: whether its micro-batches could mix.
        compares: whether what was recomputed was compared with what had been saved.
    """

    written: Mapping[str, Sequence[int]]
    reached: Mapping[int, CodeReached]
    mixes: bool
    compares: bool
