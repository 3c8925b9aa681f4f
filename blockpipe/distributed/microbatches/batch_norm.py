"""Deferred batch norm for the stages of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...preparation.batch_norm.deferred import DeferredBatchNorm


class StageBatchNorm:
    """The batch norms of a model, whose running statistics follow the whole batch if asked for.

    Args:
        model: the user's.
        is_deferred: whether it is asked for.
    """

    def __init__(self, model: nn.Module, *, is_deferred: bool) -> None:
        self.is_deferred = is_deferred
        self._deferred = DeferredBatchNorm(model) if is_deferred else None

    def __str__(self) -> str:
        return "batch norm" if self._deferred is None else "batch norm deferred"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Stand around a step; statistics are committed at its end, unless it fails."""
        if self._deferred is None:
            yield
            return
        with self._deferred.standing_in():
            yield
