"""Sum the gradients of parameters that several processes have, and clip by the norm of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._common.callsite import users_line
from .._torch.graph import hooks_of_leaf
from ..errors import UsageError
from .data_parallel.sparse_gradients import added
from .data_parallel.step_sums import StepSums
from .replicas import StageReplicas
from .stage_values import StageValues
from .tied import TiedParameters


class StageGradients:
    """The gradients of the stages that are in this process.

    Args:
        values: the parameters.
        tied: the parameters that other stages have too.
        replicas: the processes that have the same stages; ``None`` if there are none.
        group: the processes of the pipeline; ``None`` takes all of them.
        device: the device of the tensors that are exchanged.

    Attributes:
        sums: the sums over replicas of the step that is under way, or of the last one.
    """

    def __init__(
        self,
        values: StageValues,
        tied: TiedParameters,
        replicas: StageReplicas | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._values = values
        self._tied = tied
        self._replicas = replicas
        self._group = group
        self._device = device
        self.sums: StepSums | None = None

    def begin(self, microbatches: int) -> StepSums | None:
        """Return what begins to sum each stage's gradients when they are complete.

        Args:
            microbatches: of the step.
        """
        self.sums = None
        if self._replicas is not None:
            trained = self._values.trained_by_stages()
            self.sums = StepSums(self._replicas, trained, microbatches, self._device)
        return self.sums

    def check_hooks(self) -> None:
        """Raise :class:`UsageError` for hooks that would be given a part of a gradient, or step by
        it: it is summed over processes after the backwards."""
        for parameter in self._tied.parameters:
            if hooks := hooks_of_leaf(parameter):
                name = next(n for n, p in self._values.named_parameters() if p is parameter)
                raise UsageError(
                    f"expected no hooks on parameter {name!r}, whose gradient is summed over "
                    f"processes after the step, got {len(hooks)} that would be given this "
                    f"process's part ({users_line()}); change .grad after forward_backward"
                )
        if self._replicas is not None:
            self._replicas.check_hooks(self._values.named_parameters())

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Sum a step's gradients over those processes that have the same parameters, and then add
        them to those of before."""
        shared = self._tied.parameters
        if self._replicas is not None:
            shared = [*self._values.parameters()]
        before = [parameter.grad for parameter in shared]
        for parameter in shared:
            parameter.grad = None
        try:
            yield
            if self.sums is not None:
                self.sums.finish()
            self._tied.sum_gradients()
        finally:  # also where the step was refused
            for parameter, earlier in zip(shared, before, strict=True):
                if earlier is not None:
                    now = parameter.grad
                    parameter.grad = earlier if now is None else added(earlier, now)

    @torch.no_grad()
    def clip_norm(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``; return the
        norm before."""
        own = [p.grad for p in self._values.parameters() if p.grad is not None]
        counted = [
            p.grad
            for p in self._values.parameters()
            if p.grad is not None and id(p) not in self._tied.copies
        ]
        norm = nn.utils.get_total_norm(counted, norm_type).to(self._device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in own:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        return norm.to(torch.get_default_dtype())
