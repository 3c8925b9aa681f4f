"""A stage of torch's engine that notes what it does, and what it is going to wait for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..microbatches.engine_stage import EngineStage
from .progress import ProcessProgress


class WatchedStage(EngineStage):
    """A stage whose calls by the engine are noted.

    Attributes:
        progress: where they are noted.
    """

    progress: ProcessProgress

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Get what receives a forward's inputs."""
        found = super().get_fwd_recv_ops(fwd_chunk_id)
        self._expect("the results", self.stage_index - 1, fwd_chunk_id, found)
        return found

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Get what receives a backward's gradients."""
        found = super().get_bwd_recv_ops(bwd_chunk_id)
        self._expect("the gradients", self.stage_index + 1, bwd_chunk_id, found)
        return found

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        self.progress.has(("the results", self.stage_index, fwd_chunk_id))
        with self.progress.computing(self._named("the forward", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, or the part of it that gradients of inputs need."""
        self.progress.has(("the gradients", self.stage_index, bwd_chunk_id))
        return self._backward(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the rest of a backward."""
        return self._backward(super().backward_weight_one_chunk, bwd_chunk_id, *args, **kwargs)

    def _backward(self, run: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        named = self._named("the backward", chunk)
        with self.progress.computing(named):
            try:
                return run(chunk, *args, **kwargs)
            except Exception as error:
                _innermost(error).add_note(f"blockpipe: in {named}")
                raise

    def _named(self, what: str, chunk: int) -> str:
        return f"{what} of stage {self.submod.stage}, micro-batch {self.first + chunk}"

    def _expect(self, what: str, stage: int, chunk: int, found: list[dist.P2POp]) -> None:
        if found:
            self.progress.expects(
                (what, self.stage_index, chunk),
                f"{what} of micro-batch {self.first + chunk} from rank {found[0].peer}",
            )


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
