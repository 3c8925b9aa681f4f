"""One step of a distributed pipeline, whose losses and outputs the last stage's process
computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batches.batch_dims import BatchDims
from ..batches.joining import join
from ..batches.losses import checked_loss, computed_loss
from ..batches.microbatch import LossReduction, Microbatch, weights_of, weights_without_target
from ..batches.output_dims import output_dim
from ..execution.step_result import StepLoss
from .engine import Engine
from .microbatches.calls import StageCalls
from .microbatches.engine_stage import check_results
from .microbatches.loss_watch import LossWatch
from .replicas import StageReplicas
from .stage_places import StagePlaces

Run = tuple[Engine, list[Microbatch]]

_DTYPES = (
    None,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # of losses; None: the default


class StepResults:
    """The losses and outputs of one step, collected in the last stage's process.

    Args:
        loss_fn: the user's loss function; ``None`` if the model returns its loss; :func:`no_loss`
            if there is none.
        device: the device of this process's stages.
        asks_outputs: whether any process asks for the outputs.
        calls: how stages are called; ``None``: none will be.
        watch: refuses losses that read what other processes have; ``None`` where none is computed.

    Attributes:
        engine: the engine that runs.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        device: torch.device,
        calls: StageCalls | None = None,
        watch: LossWatch | None = None,
        *,
        asks_outputs: bool,
    ) -> None:
        self.calls = calls
        self._watch = watch
        self.asks_outputs = asks_outputs
        self.engine: Engine | None = None
        self._loss_fn = loss_fn
        self._device = device
        self._microbatch = -1  # the last one whose loss was asked for
        self._losses: list[Tensor] = []
        self._outputs: list[tuple[Tensor, ...]] = []

    def loss(self, results: tuple[Tensor, ...], given: tuple[float, Any]) -> Tensor:
        """Compute the weighted loss of a micro-batch, given its weight and its target."""
        weight, target = given
        assert self.engine is not None
        assert self.calls is not None
        if self.asks_outputs:
            outputs, last = tuple(result.detach() for result in results), self.engine.last
            if not self.engine.is_alone:
                check_results(outputs, last.output_metas, last.makers)
            self._outputs.append(outputs)
        if self._loss_fn is no_loss:
            return torch.zeros((), device=self._device)
        output = self.engine.last.output(results)
        self._microbatch += 1
        if not weight:  # it counts for nothing, also where its loss is no number
            nothing: Tensor = _Nothing.apply(*[r for r in results if r.requires_grad])
            return nothing
        try:
            loss = self.calls.loss(self._microbatch, lambda: self._computed(output, target))
            assert self._watch is not None
            self._watch.check(loss, results)
            loss = loss * weight
        except Exception as error:
            error.add_note(f"blockpipe: in the loss of micro-batch {self._microbatch}")
            raise
        self._losses.append(loss.detach())
        total: Tensor = loss.sum()  # 0-d, and no view: the engine detaches it in place
        return total

    def _computed(self, output: Any, target: Any) -> Tensor:
        assert self._watch is not None
        with self._watch.watching(self._loss_fn):
            return checked_loss(computed_loss(output, target, self._loss_fn))

    def shared_loss(self, places: StagePlaces, replicas: StageReplicas | None) -> Tensor:
        """Return the batch's loss, from the last stage's process to all."""
        kinds = [part.dtype for part in self._losses]
        kind = functools.reduce(torch.promote_types, kinds) if kinds else None
        known = _DTYPES.index(kind) if kind in _DTYPES else 0
        shared = torch.tensor([0.0, known], dtype=torch.float64, device=self._device)
        total, known_by_last = shared
        for part in self._losses:
            total += part.reshape(())
        places.broadcast(shared, -1)
        if replicas is not None and self._loss_fn is not no_loss:
            total.fill_(replicas.total(total.item(), self._device))
        loss: Tensor = total.to(_DTYPES[int(known_by_last)] or torch.get_default_dtype())
        return loss.as_subclass(StepLoss)

    def shared_outputs(
        self,
        runs: list[Run],
        reduction: LossReduction,
        dims: BatchDims,
        places: StagePlaces,
        home: int,
    ) -> Any:
        """Return the joined outputs, from the last stage's process to all."""
        microbatches = [microbatch for _, part in runs for microbatch in part]
        weights = self._output_weights(microbatches, reduction, places, home)
        results, given = [], iter(self._outputs)
        for engine, part in runs:
            for _ in part:
                metas = engine.last.output_metas
                if engine.has_last:
                    found = next(given)
                else:
                    found = tuple(meta.example(self._device).detach() for meta in metas)
                for tensor in found:
                    places.broadcast(tensor, -1)
                results.append(engine.last.output(found))
        sizes = [microbatch.size for microbatch in microbatches]
        dim = output_dim(dims, results, sizes)
        return join(results, sizes, weights, self._device, dim)[0]

    def _output_weights(
        self,
        microbatches: list[Microbatch],
        reduction: LossReduction,
        places: StagePlaces,
        home: int,
    ) -> list[float]:
        """The weights of outputs that are one number, as the process of stage ``home`` has them."""
        own = [1.0] * len(microbatches)
        if places.is_own(home):
            own, _ = weights_without_target(microbatches, reduction)
        shared = torch.tensor(own, dtype=torch.float64, device=self._device)
        places.broadcast(shared, home)
        found: list[float] = shared.tolist()
        return found


def no_loss(*_: Any) -> None:
    """Stands for the loss of a call without one."""


def loss_weights(
    microbatches: list[Microbatch],
    reduction: LossReduction,
    replicas: StageReplicas | None,
    device: torch.device,
    places: StagePlaces,
    home: int,
) -> list[float]:
    """Return the weights of the micro-batches' losses in the batch of all replicas.

    Args:
        microbatches: of this replica.
        reduction: the user's.
        replicas: the processes that have the same stages; ``None``: there are none.
        device: where tensors for them are.
        places: the ranks of the stages.
        home: the stage whose process has what ``reduction`` counts in: 0, or -1 for the last one.
    """
    is_home = places.is_own(home)
    is_known = is_home or not callable(reduction)
    weights = weights_of(microbatches, reduction) if is_known else [1.0] * len(microbatches)
    own = float(sum(m.size for m in microbatches))
    if replicas is not None and is_home and callable(reduction):
        own = float(sum(reduction(m.args, m.kwargs, m.target) for m in microbatches))
    if callable(reduction) and home != -1:  # the losses are computed in the last stage's process
        shared = torch.tensor([own, *weights], dtype=torch.float64, device=device)
        places.broadcast(shared, home)
        own, *weights = shared.tolist()
    if replicas is None or reduction == "sum":
        return weights
    share = own / replicas.total(own, device)
    return [weight * share for weight in weights]


class _Nothing(torch.autograd.Function):
    """A loss of zero, whose gradients are zero."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        """Return zero."""
        ctx.shapes = [(r.shape, r.dtype, r.device) for r in results]
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return zeros."""
        return tuple(torch.zeros(s, dtype=d, device=w) for s, d, w in ctx.shapes)
