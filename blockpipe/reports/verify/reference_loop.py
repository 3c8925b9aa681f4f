"""The plain loop over micro-batches, which a pipeline's step is compared with.

It is written out here and not shared with the engine's plain loop: this is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.nested import map_tensors
from ..._common.threads.thread_state import CallerState, theirs
from ...batches.batch_dims import BatchDims
from ...batches.joining import join
from ...batches.microbatch import LossReduction, Microbatch, weights_of
from ...batches.output_dims import output_dim
from ...crossing.hop_backward import run_engine
from ...devices.rng_streams import RngStreams, Source
from ...preparation.batch_norm.deferred import DeferredBatchNorm
from ...stages.cursor import set_microbatch


class ReferenceLoop:
    """One step of a model on one device, a micro-batch at a time.

    Args:
        microbatches: the batch.
        loss_fn: the loss of an output and a target; ``None``: there is no backward.
        reduction: how losses are weighted.
        dims: how outputs are joined.
        sources: the generators that the step draws from.
        is_deferred: whether batch norm is deferred.
        others: micro-batches of the same batch that run elsewhere; they count in the weights of
            losses.
    """

    def __init__(
        self,
        microbatches: list[Microbatch],
        loss_fn: Callable[..., Any] | None,
        reduction: LossReduction,
        dims: BatchDims,
        sources: Sequence[Source],
        *,
        is_deferred: bool,
        others: Sequence[Microbatch] = (),
    ) -> None:
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        with theirs():
            self._weights = weights_of([*microbatches, *others], reduction)[: len(microbatches)]
            self._output_weights = weights_of(microbatches, reduction)
        self._dims = dims
        self._sources = [*sources]
        self._is_deferred = is_deferred

    def run(self, model: nn.Module, device: torch.device | None) -> tuple[Any, Tensor | None]:
        """Run the step, which adds to the model's gradients.

        Args:
            model: the model.
            device: where outputs are joined.

        Returns:
            The joined outputs and the loss of the batch; no loss without a backward.
        """
        streams = RngStreams(self._sources, len(self._microbatches))
        outputs: list[Any] = []
        total, ambient = None, CallerState()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._loss_fn is not None))
            if self._is_deferred:
                stack.enter_context(DeferredBatchNorm(model).standing_in())
            batches = zip(self._microbatches, self._weights, strict=True)
            for m, (batch, weight) in enumerate(batches):
                outer = set_microbatch(m)
                streams.enter(m, self._sources)
                try:
                    with theirs(), ambient.uncached_autocast():
                        output, loss = self._forward(model, batch)
                finally:
                    streams.leave(m)
                    set_microbatch(outer)
                outputs.append(map_tensors(lambda t: t.detach().clone(), output))
                if loss is not None and weight:
                    with ambient.no_autocast():
                        root = torch.full_like(loss, weight)
                        run_engine((loss,), (root,), False, False, (), True, True)
                    part = loss.detach().reshape(()) * weight
                    total = part if total is None else total + part
        sizes = [batch.size for batch in self._microbatches]
        dim = output_dim(self._dims, outputs, sizes)
        return join(outputs, sizes, self._output_weights, device, dim)[0], total

    def _forward(self, model: nn.Module, batch: Microbatch) -> tuple[Any, Tensor | None]:
        output = model(*batch.args, **batch.kwargs)
        if self._loss_fn is None:
            return output, None
        given = () if batch.target is None else (batch.target,)
        return output, self._loss_fn(output, *given)
