"""The call of a stage for one micro-batch: with its random numbers, and recomputed if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ...preparation.options import recomputes
from ...stages.cursor import set_microbatch
from .engine_stage import StageSumming
from .streams import StepStreams

Run = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class CalledStage(Protocol):
    """What the calls have to know of a stage."""

    index: int
    hands_on: bool
    recomputes: bool

    @property
    def is_last(self) -> bool:
        """Whether it is the last one."""

    def run(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run its tape."""


class StageCalls:
    """The calls of one step's stages in one process.

    Args:
        streams: the random numbers.
        checkpoint: the micro-batches whose calls are recomputed, as ``Pipeline`` says it.
        microbatches: how many there are.
        sums: sums gradients when they are complete; ``None``: nobody does.
    """

    def __init__(
        self,
        streams: StepStreams,
        checkpoint: str,
        microbatches: int,
        sums: StageSumming | None = None,
    ) -> None:
        self.streams = streams
        self.sums = sums
        self._checkpoint = checkpoint
        self._microbatches = microbatches

    def run(
        self, stage: CalledStage, microbatch: int, given: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a stage, given the tensors that the engine has brought."""
        handed = None
        if stage.hands_on and stage.index:
            *tensors, handed = given
            given = tuple(tensors)
        stage.recomputes = recomputes(self._checkpoint, microbatch, self._microbatches)
        before = set_microbatch(microbatch)
        try:
            with self.streams.drawing(microbatch, handed):
                results = stage.run(given)
        finally:
            set_microbatch(before)
        if stage.hands_on and not stage.is_last:
            results = (*results, self.streams.state(microbatch))
        return results

    def loss(self, microbatch: int, compute: Callable[[], Any]) -> Any:
        """Compute the loss of a micro-batch, which goes on with its random numbers."""
        before = set_microbatch(microbatch)
        try:
            with self.streams.drawing(microbatch, None):
                return compute()
        finally:
            set_microbatch(before)
