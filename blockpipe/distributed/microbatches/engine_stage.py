"""torch's stage of a pipeline, as the engine here drives it."""

from __future__ import annotations

from typing import Any, Protocol

from torch.distributed.pipelining import PipelineStage

from ...errors import BlockpipeError
from ...schedules.schedule import Kind


class StageObserver(Protocol):
    """Observes what the stages of this process do."""

    def begins(self) -> None:
        """An action begins."""

    def ends(self, kind: Kind, stage: int, microbatch: int) -> None:
        """The action is over."""


class StageSumming(Protocol):
    """Sums gradients when they are complete."""

    def completed(self, stage: int) -> None:
        """A backward of a stage is over."""


class EngineStage(PipelineStage):
    """A stage that tells an observer when it works, and that runs without a backward as well.

    Attributes:
        first: the number of the first micro-batch; torch counts from 0 in each of its steps.
        observer: hears of each action; ``None``: nobody does.
        sums: hears of each backward that is complete; ``None``: nobody does.
    """

    first = 0
    observer: StageObserver | None = None
    sums: StageSumming | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        try:
            return self._observed("F", fwd_chunk_id, super().forward_one_chunk, args, kwargs)
        except RuntimeError as error:  # torch's, around the stage's own
            if isinstance(error.__cause__, BlockpipeError):
                raise error.__cause__ from None
            raise

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, or its first part."""
        result = self._observed("B", bwd_chunk_id, super().backward_one_chunk, args, kwargs)
        if kwargs.get("full_backward", True):
            self._completed()
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the second part of a backward."""
        run = super().backward_weight_one_chunk
        result = self._observed("W", bwd_chunk_id, run, args, kwargs)
        self._completed()
        return result

    def _completed(self) -> None:
        if self.sums is not None:
            self.sums.completed(self.stage_index)

    # Of two neighbours in one process, torch hands the gradient over also where there is none.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the stage before, which is in this process."""
        own: Any = super()
        return own.get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the stage after, which is in this process."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _observed(self, kind: Kind, chunk: int, run: Any, args: Any, kwargs: Any) -> Any:
        observer = self.observer
        if observer is None or not (kind == "F" or self.has_backward):
            return run(chunk, *args, **kwargs)
        observer.begins()
        result = run(chunk, *args, **kwargs)
        observer.ends(kind, self.stage_index, self.first + chunk)
        return result
