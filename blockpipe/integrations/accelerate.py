"""Hugging Face Accelerate: an ``Accelerator`` that takes a pipeline as the model.

``Accelerator.prepare`` moves a model to one device and puts autocast around its ``forward``. A
pipeline has several devices, and a step that includes the backward does not go through ``forward``.
So the pipeline's inner model is prepared instead, and not moved: autocast is then inside each
micro-batch's forward, as it is for the plain model.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ModuleNotFoundError(
        f"blockpipe.integrations.accelerate needs the package accelerate ({error}); "
        "pip install accelerate",
        name=error.name,
    ) from error

from .._common.callsite import remembers_caller, users_line
from .._common.checks import expected
from .._common.hints import REPLICATED
from ..errors import UsageError
from ..execution.scaled_gradients import scaled_gradients
from ..execution.step_result import StepResult
from ..pipeline import Pipeline
from ..weights.accelerate_hooks import PREPARED

__all__ = ["PipelineAccelerator"]


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` whose ``prepare`` also takes a :class:`~blockpipe.Pipeline`.

    The pipeline is prepared in place and stays on its stages' devices. Everything else is as in
    Accelerate: optimizers, loaders and schedulers, ``accumulate``, ``clip_grad_norm_``,
    ``save_state`` and ``load_state``, ``backward`` after ``pipe(x)``. In the place of a forward and
    ``backward`` there is :meth:`forward_backward`, which can hold fewer activations. A prepared
    pipeline's own ``forward_backward`` is refused, because its gradients are not scaled.

    Mixed precision is inside each micro-batch's forward; it holds in ``pipe.module`` from then on.
    Several processes are refused.

    Source: ``accelerate.Accelerator``, whose arguments it takes.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.integrations.accelerate import PipelineAccelerator
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
        >>> optimizer = torch.optim.AdamW(net.parameters())
        >>> accelerator = PipelineAccelerator(cpu=True)
        >>> pipe, optimizer = accelerator.prepare(pipe, optimizer)
        >>> accelerator.forward_backward(pipe, torch.ones(4, 4), loss_fn=torch.mean).loss.shape
        torch.Size([])
        >>> optimizer.step()
    """

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model as Accelerate does; a pipeline is never moved.

        Raises:
            UsageError: the model is a pipeline, and there are several processes, ``torch.compile``
                or fp8.
        """
        if not isinstance(model, Pipeline):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        self._check_pipelines()
        if model not in self._models:
            # As for evaluation: preparation for training only adds wrappers for several processes.
            super().prepare_model(model.module, device_placement=False, evaluation_mode=True)
            self._models[-1] = model
            setattr(model, PREPARED, True)
        return model

    @remembers_caller
    def forward_backward(
        self,
        pipe: Pipeline,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run :meth:`Pipeline.forward_backward`, with gradients scaled as ``backward`` scales them.

        They are those of the loss divided by ``gradient_accumulation_steps`` and, with fp16, times
        the scaler's factor. The loss that is returned is neither.

        Args:
            pipe: as ``prepare`` returned it.
            *args: as for :meth:`Pipeline.forward_backward`.
            target: as for :meth:`Pipeline.forward_backward`.
            loss_fn: as for :meth:`Pipeline.forward_backward`.
            return_outputs: as for :meth:`Pipeline.forward_backward`.
            **kwargs: the model's keyword arguments.

        Raises:
            UsageError: the pipeline is not prepared.
        """
        if not isinstance(pipe, Pipeline):
            raise UsageError(
                expected(
                    "a Pipeline as the first argument",
                    pipe,
                    fix="write accelerator.forward_backward(pipe, x, target=y, loss_fn=loss_fn)",
                )
            )
        if pipe not in self._models:
            raise UsageError(
                f"expected a pipeline that is prepared, got {type(pipe).__name__} that is not "
                f"({users_line()}); write pipe = accelerator.prepare(pipe)"
            )
        with scaled_gradients(self._scaled):
            return pipe.forward_backward(
                *args, target=target, loss_fn=loss_fn, return_outputs=return_outputs, **kwargs
            )

    @remembers_caller
    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As Accelerate's.

        Raises:
            UsageError: the result of a step, whose backward has run.
        """
        if isinstance(loss, StepResult):
            raise UsageError(
                "expected a loss with a graph, got the result of forward_backward, which has run "
                f"the backward already ({users_line()}); remove this call"
            )
        super().backward(loss, **kwargs)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Unwrap a model as Accelerate does; of a pipeline, return the model inside it."""
        model = model.module if isinstance(model, Pipeline) else model
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped

    def _scaled(self, loss: Tensor) -> Tensor:
        loss = loss / self.gradient_accumulation_steps
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _check_pipelines(self) -> None:
        """Raise :class:`UsageError` for settings that do not work for a model in a pipeline."""
        if self.num_processes > 1:
            raise UsageError(
                f"expected one process for a pipeline, got {self.num_processes} ({users_line()}): "
                "DistributedDataParallel would reduce gradients once for each micro-batch; do not "
                f"prepare the pipeline, and {REPLICATED}"
            )
        if self.mixed_precision == "fp8":
            raise UsageError(
                f"expected mixed_precision 'no', 'bf16' or 'fp16' for a pipeline, got 'fp8' "
                f"({users_line()}): it would replace modules; replace them before Pipeline(…)"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise UsageError(
                f"expected no dynamo_backend for a pipeline, got "
                f"{self.state.dynamo_plugin.backend.value!r} ({users_line()}): torch.compile "
                "cannot see its stages; pipe.compile() compiles the modules inside them"
            )
