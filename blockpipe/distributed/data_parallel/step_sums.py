"""The sums of gradients over replicas in a step over processes, begun while other stages still run.

A stage's gradients are complete after its last backward, and the process then waits for other
stages, or runs its own other ones. All replicas have to sum in one order, and micro-batches may
come in another one in each: so the stages' sums begin from the last stage on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..replicas import PendingSum, StageReplicas


class StepSums:
    """The sums of one step in one process.

    Args:
        replicas: the processes that have the same stages.
        parameters: those of this process, by the stages that read them.
        microbatches: how many there are.
        device: of this process's stages.

    Attributes:
        order: for each sum that has begun, its stages, and whether others still ran; for tests.
    """

    def __init__(
        self,
        replicas: StageReplicas,
        parameters: Mapping[tuple[int, ...], Sequence[Tensor]],
        microbatches: int,
        device: torch.device,
    ) -> None:
        self._replicas = replicas
        self._device = device
        self._left = {stage: microbatches for stages in parameters for stage in stages}
        self._waiting = sorted(parameters.items(), key=lambda item: (-min(item[0]), item[0]))
        self._pending: list[PendingSum] = []
        self.order: list[tuple[tuple[int, ...], bool]] = []

    def completed(self, stage: int) -> None:
        """A backward of a stage is over, with the part for its weights."""
        if stage in self._left:
            self._left[stage] -= 1
            self._begin()

    def begin_rest(self) -> None:
        """All backwards are over: begin what has not begun."""
        self._left.clear()
        self._begin()

    def finish(self) -> None:
        """Wait for the sums."""
        for pending in self._pending:
            pending.finish()
        self._pending.clear()

    def _begin(self) -> None:
        while self._waiting:
            stages, parameters = self._waiting[0]
            if any(self._left.get(stage, 0) > 0 for stage in stages):
                return
            del self._waiting[0]
            self.order.append((stages, any(left > 0 for left in self._left.values())))
            self._pending.append(self._replicas.begin_sum(parameters, self._device))
