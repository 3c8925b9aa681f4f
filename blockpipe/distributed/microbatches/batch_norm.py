"""Deferred batch norm for the stages of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ...preparation.batch_norm import DeferredBatchNorm


class StageBatchNorm:
    """The batch norms of a model, whose running statistics follow the whole batch if asked for.

    Args:
        model: the user's.
        is_deferred: whether it is asked for.
    """

    def __init__(self, model: nn.Module, *, is_deferred: bool) -> None:
        self._model = model
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
        with ExitStack() as stack:
            for path, make in self._deferred.stand_ins().items():
                module = self._model.get_submodule(path)
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = make(module.forward)
                stack.callback(_put_back, module, own)
            stack.enter_context(self._deferred.step())
            yield


def _put_back(module: nn.Module, own: Any) -> None:
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own
