"""A pipeline in each process, with a share of every batch, and one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected
from ...batches.batch_dims import BatchDims, dims_of_call
from ...batches.losses import computed_loss
from ...batches.microbatch import LossReduction, split
from ...devices.devices import is_on_meta
from ...devices.observer import Observer
from ...errors import UsageError
from ...execution.step_result import StepLoss, StepResult
from ...preparation.prepared import Prepared
from ..replicas import StageReplicas
from .stage_sums import StageSums

Observes = Callable[[Prepared, int], Observer]


class OnePipeline(Protocol):
    """What is needed of a :class:`Pipeline`."""

    module: nn.Module

    @property
    def chunks(self) -> int: ...
    @property
    def batch_dims(self) -> BatchDims: ...
    @property
    def loss_reduction(self) -> LossReduction: ...
    def forward_backward(self, *args: Any, **kwargs: Any) -> StepResult: ...
    def observed_by(self, observes: Observes) -> AbstractContextManager[None]: ...


class ReplicatedPipeline:
    """A :class:`Pipeline` in each of several processes, each with a share of every batch.

    Every process makes one, and calls :meth:`forward_backward` at the same time. Parameters and
    buffers begin as the first process has them. Each stage's gradients are summed as soon as its
    last backward is over, while earlier stages still run; then they are those of all shares.

    Args:
        pipe: with all of its stages on devices of this process; its model has values.
        group: the processes; ``None``: all.
        mesh: instead of a group, a mesh of one dim.

    Raises:
        UsageError: no process group, a mesh of several dims, or a model on the meta device.

    Source: ``torch.nn.parallel.DistributedDataParallel``.
    """

    @remembers_caller
    def __init__(
        self,
        pipe: OnePipeline,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not dist.is_initialized() or is_on_meta(pipe.module):
            raise UsageError(
                "expected a process group and a model with values "
                f"({users_line()}); call torch.distributed.init_process_group() and "
                "blockpipe.materialize(model, …) first"
            )
        if mesh is not None:
            if mesh.ndim != 1 or group is not None:
                fix = "pass mesh['replicas'] of a larger one"
                raise UsageError(
                    expected("a mesh of one dim and no group", mesh, for_="mesh", fix=fix)
                )
            group = mesh.get_group()
        self.pipe = pipe
        self.sums: StageSums | None = None
        everyone = group or dist.group.WORLD
        assert everyone is not None  # there is one where torch is initialized
        self._replicas = StageReplicas(everyone)
        with torch.no_grad():
            self._replicas.broadcast([*pipe.module.parameters(), *pipe.module.buffers()])

    @remembers_caller
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """As :meth:`Pipeline.forward_backward`, of this process's share of the batch.

        Args:
            *args: as for :meth:`Pipeline.forward_backward`.
            target: as for :meth:`Pipeline.forward_backward`.
            loss_fn: as for :meth:`Pipeline.forward_backward`.
            return_outputs: as for :meth:`Pipeline.forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            The loss of all shares, in every process, and the outputs of this process's share.

        Raises:
            The first exception of the step. The other processes wait for as long as
            ``init_process_group(timeout=…)`` says.
        """
        weight = self._weight(args, kwargs, target)

        def weighted(output: Any, target: Any = None) -> Any:
            return computed_loss(output, target, loss_fn) * weight

        with self._summing():
            result = self.pipe.forward_backward(
                *args, target=target, loss_fn=weighted, return_outputs=return_outputs, **kwargs
            )
        loss = result.loss
        total = self._replicas.total(loss.item(), loss.device)
        shared: Tensor = torch.tensor(total, dtype=loss.dtype, device=loss.device)
        return StepResult(shared.as_subclass(StepLoss), result.outputs)

    def _weight(self, args: Any, kwargs: dict[str, Any], target: Any) -> float:
        """The share of this process in the loss of the whole batch."""
        reduction = self.pipe.loss_reduction
        if reduction == "sum":
            return 1.0
        dims = dims_of_call(self.pipe.module, self.pipe.batch_dims, args, kwargs)
        parts = split(args, kwargs, target, self.pipe.chunks, dims)
        own = float(sum(part.size for part in parts))
        if callable(reduction):
            own = float(sum(reduction(part.args, part.kwargs, part.target) for part in parts))
        return own / self._replicas.total(own, next(self.pipe.module.parameters()).device)

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """Sum the gradients of a step, and add them to those of before."""
        parameters = [*self.pipe.module.parameters()]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.sums = None
        try:
            with self.pipe.observed_by(self._observes):
                yield
        except BaseException:
            if self.sums is not None:
                self.sums.finish(failed=True)
            raise
        assert self.sums is not None
        self.sums.finish(failed=False)
        for parameter, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _observes(self, prepared: Prepared, microbatches: int) -> Observer:
        self.sums = StageSums(self.pipe.module, self._replicas, prepared, microbatches)
        return self.sums
