"""The class ``DistributedPipeline``: stages in separate processes, with the calls of
``Pipeline``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._common.callsite import remembers_caller, users_line
from .._common.nested import map_tensors, tensors
from .._torch.modes import untraced
from ..batches.batch_dims import BatchDims, dims_of_call
from ..batches.class_weights import reduction_for
from ..batches.microbatch import LossReduction, Microbatch, split, weights_of
from ..errors import UsageError
from ..execution.step_result import StepResult
from ..preparation.options import as_sample, check_checkpoint, check_loss
from ..stages.plan import StagePlan
from ..weights.materialize import Init
from ..weights.sources import Weights
from .agreement import UNLIKE, Agreement, Kind
from .build import fill_own
from .engine import schedule_name
from .engines import Engines
from .gradients import StageGradients
from .kinds import check_alike, kind_of_forward, kind_of_step
from .microbatches.batch_norm import StageBatchNorm
from .microbatches.calls import StageCalls
from .microbatches.streams import StepStreams
from .rank_failures.failures import Failures
from .replicas import StageReplicas, processes_of
from .reporting.report_methods import StageReportMethods
from .stage_values import StageValues
from .state.homes import ValueHomes, is_known, loading, words_of
from .state.state_methods import StageStateMethods
from .step import Run, StepResults, loss_weights, no_loss
from .tied import TiedParameters

_OUTPUTS = 1  # a process asks for them
_ELSEWHERE = 2  # a process knows that another pipeline has had the model's tensors
_TIMEOUT = 600.0  # seconds, as NCCL's


class DistributedPipeline(StageStateMethods, StageReportMethods):
    """A marked model, one or several of whose stages run in this process.

    Every process makes one from the same model with the same options, and calls the same methods at
    the same time with arguments of the same shapes. The values of a batch matter only in the
    process of the first stage, and those of the target in the process of the last one.

    Args:
        model: the model, marked as for :class:`Pipeline`. If ``weights`` or ``init`` is given, it
            is on the meta device, and each process has the values of its own stages only.
        sample: ``(args, kwargs)`` of a batch, or its only argument; only shapes and dtypes matter.
        device: the device of this process's stages; ``None`` is the current accelerator of torch's
            process group, or the CPU.
        group: the processes of the pipeline; ``None`` takes all of them.
        mesh: instead of a group, a mesh of two dims: replicas, and the processes of each one's
            pipeline. Each replica is passed a share of the batch; the loss and the gradients are
            those of all shares together.
        chunks: as for :class:`Pipeline`.
        schedule: one of torch's: ``"gpipe"``, ``"1f1b"``, ``"looped-bfs"``, ``"interleaved"``
            (several stages a process), ``"zb-h1"``, ``"zb-v"`` or ``"dualpipe-v"`` (the backward
            in two parts; the last two have two stages a process, in a V).
        checkpoint: as for :class:`Pipeline`.
        deferred_batch_norm: as for :class:`Pipeline`; each replica has the statistics of its own
            share.
        plan: as for :class:`Pipeline`.
        batch_dims: as for :class:`Pipeline`.
        loss_reduction: as for :class:`Pipeline`.
        weights: as for :class:`Pipeline`; each process reads its own stages' tensors.
        init: as for :class:`Pipeline`.
        timeout: seconds for which no process may go on while one of them waits. One forward or
            backward of a micro-batch, the first with its compilation, and what a script does
            between two steps are to take less.

    Raises:
        RecordingError: the code between modules cannot be replayed.
        ScheduleError: the schedule does not take so many stages or micro-batches.
        RankError: another process failed, or has another model, other options or shapes.

    Source: ``torch.distributed.pipelining`` is the engine; the calls are :class:`Pipeline`'s.

    Example:
        One process with two stages; under ``torchrun``, ``init_process_group()`` needs no arguments
        and each process makes the same pipeline.

        >>> import torch, blockpipe as bp
        >>> import torch.distributed as dist
        >>> from blockpipe.distributed import DistributedPipeline
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> pipe = DistributedPipeline(net, sample=x, device="cpu", chunks=4, schedule="looped-bfs")
        >>> result = pipe.forward_backward(x, target=y, loss_fn=torch.nn.functional.mse_loss)
        >>> result.loss.shape, net[0].weight.grad.shape
        (torch.Size([]), torch.Size([4, 4]))
        >>> dist.destroy_process_group()
    """

    @remembers_caller
    def __init__(
        self,
        model: nn.Module,
        *,
        sample: Any,
        device: Any = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        chunks: int = 1,
        schedule: str = "1f1b",
        checkpoint: str = "never",
        deferred_batch_norm: bool = False,
        plan: StagePlan | None = None,
        batch_dims: BatchDims = None,
        loss_reduction: LossReduction = "mean",
        weights: Weights | None = None,
        init: Init | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        _check_process_group()
        self.module = model
        self.chunks = chunks
        self.schedule = schedule_name(schedule)
        check_checkpoint(checkpoint)
        self.checkpoint = checkpoint
        self.batch_dims = batch_dims
        self._batch_norm = StageBatchNorm(model, is_deferred=deferred_batch_norm)
        self.loss_reduction = loss_reduction
        group, replicas, members = processes_of(group, mesh)
        self._replicas = None if replicas is None else StageReplicas(replicas)
        self._device = _device_of(device)
        groups = [group] if replicas is None else [group, replicas]
        self._failures = Failures(groups, members, self._device, timeout)
        self._agreement = Agreement(group, replicas, self._device, self._failures)
        progress = self._failures.progress
        self._engines = Engines(model, plan, self._device, group, self._compute_loss, progress)
        self._step = StepResults(None, self._device, asks_outputs=False)
        args, kwargs = as_sample(sample)
        with self._failures.told():
            self._start(args, kwargs, weights, init)
            tied = self._tied(group)
            tied.broadcast()
            if self._replicas is not None:
                self._replicas.broadcast([*self._values.parameters(), *self._values.buffers()])
        self._gradients = StageGradients(self._values, tied, self._replicas, group, self._device)

    def _start(self, args: Any, kwargs: Any, weights: Weights | None, init: Init | None) -> None:
        """Record the sample, and have the values of this process's stages."""
        asks = _ELSEWHERE * is_known(self.module)
        with self._agreement.at_end(lambda: self._kind(args, kwargs, None), asks) as asked:
            self._engines.start(self._split(args, kwargs, None)[0], self.schedule)
            self._values = self._filled(weights, init)
        self._agreement.check(kind_of_forward(self._engines.first))
        words, group = words_of(self.module), self._engines.places.group
        how = group, self._device, self._failures
        self._homes = ValueHomes(self.module, self._values, *how)
        if asked[0] & _ELSEWHERE:
            self._homes.take(words)
        self._failures.began = True

    def _filled(self, weights: Weights | None, init: Init | None) -> StageValues:
        """The values of this process's stages, after they were read where that is asked for."""
        cut, places = self._engines.first, self._engines.places
        numbers = {cut.stages[stage].stage for stage in places.own}
        with loading(self.module):
            fill_own(self.module, cut.recording, numbers, self._device, weights, init)
        values = StageValues(cut, places)
        self._engines.watched.placed()
        return values

    def _tied(self, group: dist.ProcessGroup | None) -> TiedParameters:
        tied, own = self._engines.first.tied(), dict(self.named_parameters())
        by_name = {name: own[name] for name in tied if name in own}
        return TiedParameters(tied, self._engines.places.ranks, by_name, group, self._device)

    # --- what it has

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self._device

    def train(self, mode: bool = True) -> DistributedPipeline:
        """Put the model into training mode; the next step is recorded anew for it."""
        self.module.train(mode)
        return self

    def eval(self) -> DistributedPipeline:
        """Put the model into evaluation mode."""
        return self.train(False)

    # --- steps

    @untraced
    @remembers_caller
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run a step's forwards and backwards; gradients add up in ``.grad``.

        Args:
            *args: the model's arguments, for the whole batch.
            target: the second argument of ``loss_fn``.
            loss_fn: as for :meth:`Pipeline.forward_backward`; it runs in the last stage's process.
            return_outputs: whether this process wants the joined outputs.
            **kwargs: the model's keyword arguments.

        Returns:
            The batch's loss, in every process, and the outputs where they were asked for.

        Raises:
            RankError: another process failed before the step, or passed other shapes.
        """
        with self._failures.told(), self._gradients.summing():
            return self._run(args, kwargs, target, loss_fn, return_outputs, backward=True)

    @untraced
    @remembers_caller
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward without gradients; return the joined outputs in every process.

        Raises:
            UsageError: gradients are on.
        """
        with self._failures.told():
            return self._run(args, kwargs, None, None, True, backward=False).outputs

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        return_outputs: bool,
        *,
        backward: bool,
    ) -> StepResult:
        asks = _OUTPUTS * return_outputs | _ELSEWHERE * self._homes.are_elsewhere()
        with self._agreement.at_end(lambda: self._kind(args, kwargs, loss_fn), asks) as asked:
            self._check_call(args, kwargs, target, loss_fn, backward=backward)
            microbatches = self._split(args, kwargs, target)
            runs = self._runs(microbatches, loss_fn)
            for engine, _ in runs if backward else ():
                engine.check_hooks()
            places, outputs = self._engines.places, None
            home = 0 if loss_fn is None else -1  # only the last stage's process has the target
            reduction = reduction_for(loss_fn, self.loss_reduction)
            if backward and places.is_own(home):
                weights_of(microbatches, reduction)  # for its errors
        self._engines.agreed(alike=not asked[0] & UNLIKE)
        if asked[0] & _ELSEWHERE:
            self._homes.take(words_of(self.module), backward=backward)
        self._failures.began, weights = True, [1.0] * len(microbatches)
        if backward:
            whose = reduction, self._replicas, self._device, places, home
            weights = loss_weights(microbatches, *whose)
        asks_outputs = bool(asked[0] & _OUTPUTS)
        sources = dict.fromkeys(source for engine, _ in runs for source in engine.sources)
        streams = StepStreams([*sources], self._device, places, self._replicas)
        sums = self._gradients.begin(len(microbatches)) if backward else None
        calls = StageCalls(streams, self.checkpoint, len(microbatches), sums)
        loss_fn = loss_fn if backward else no_loss
        watch = self._values.loss_watch
        step = StepResults(loss_fn, self._device, calls, watch, asks_outputs=asks_outputs)
        with streams.step(), self._batch_norm.step():
            self._run_engines(step, calls, runs, weights, backward=backward)
            if sums is not None:
                sums.begin_rest()
        self._engines.watched.step_is_over()
        self._failures.progress.done("the last micro-batch")
        loss = step.shared_loss(places, self._replicas)
        if asks_outputs:
            dims = self.batch_dims
            outputs = step.shared_outputs(runs, self.loss_reduction, dims, places, home)
        return StepResult(loss, outputs if return_outputs else None)

    def _check_call(
        self, args: Any, kwargs: Any, target: Any, loss_fn: Any, *, backward: bool
    ) -> None:
        """Refuse what this process was asked for, where the others hear of it."""
        if not backward and torch.is_grad_enabled():
            raise UsageError(
                "expected a call without gradients, for a graph does not span processes, got one "
                f"with them ({users_line()}); call it under torch.no_grad(), or "
                "forward_backward(…)"
            )
        if any(t.requires_grad for t in tensors((args, kwargs))):
            raise UsageError(
                "expected inputs that need no gradient, for it would not reach them, got one "
                f"that does ({users_line()}); pass it detached"
            )
        if backward:
            check_loss(loss_fn, target)
            if self._replicas is not None:
                self._replicas.check_loss(loss_fn)
            self._gradients.check_hooks()

    def _run_engines(
        self,
        step: StepResults,
        calls: StageCalls,
        runs: list[Run],
        weights: list[float],
        *,
        backward: bool,
    ) -> None:
        self._step, at = step, 0
        if self._profile is not None:
            self._profile.begin_step()
        for engine, part in runs:
            inputs = None
            if engine.first is not None:
                inputs = [
                    tuple(t.to(self._device) for t in engine.first.arguments(*m.args, **m.kwargs))
                    for m in part
                ]
            step.engine = engine
            targets = [(weights[at + k], self._moved(m.target)) for k, m in enumerate(part)]
            engine.run(calls, inputs, targets, at, self._profile, backward=backward)
            at += len(part)
        self._step = StepResults(None, self._device, asks_outputs=False)

    def _compute_loss(self, results: tuple[Tensor, ...], given: tuple[float, Any]) -> Tensor:
        """Compute a micro-batch's loss; the engine calls it in the last stage's process."""
        with self._failures.progress.computing("a loss"):
            return self._step.loss(results, given)

    # --- between steps

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``.

        A parameter that several processes have counts once. All processes call it together.

        Args:
            max_norm: the most that the norm may be.
            norm_type: which norm: ``2.0``, or ``inf`` for the largest absolute value.

        Returns:
            The norm of all gradients before, in every process.
        """
        with self._failures.told(agreed=True):
            return self._gradients.clip_norm(max_norm, norm_type)

    # --- how

    def _kind(self, args: Any, kwargs: Any, loss_fn: object) -> Kind:
        """Describe a step, with the same words in every process."""
        options = {
            "schedule": self.schedule,
            "loss": loss_fn or "the model's",
            "loss_reduction": self.loss_reduction,
            "checkpoint": self.checkpoint,
            "batch norm": self._batch_norm,
        }
        kind = kind_of_step(
            self.module,
            args,
            kwargs,
            options,
            self.chunks,
            answers=self._engines.answers,
            digests=self._engines.digests,
            modes=self._engines.modes,
        )
        return replace(kind, made=self._engines.numbers())

    def _split(self, args: Any, kwargs: dict[str, Any], target: Any) -> list[Microbatch]:
        dims = dims_of_call(self.module, self.batch_dims, args, kwargs, target)
        return split(args, kwargs, target, self.chunks, dims)

    def _runs(
        self, microbatches: list[Microbatch], loss_fn: Callable[..., Any] | None = None
    ) -> list[Run]:
        """Micro-batches of one size after the other, with their engines; the larger come first."""
        parts: list[list[Microbatch]] = []
        self._engines.begin_step()
        for microbatch in microbatches:
            if not parts or parts[-1][0].size != microbatch.size:
                parts.append([])
            parts[-1].append(microbatch)
        for part in parts:
            check_alike(part)
        how = self.schedule, self.chunks, loss_fn
        return [(self._engines.engine(part, *how), part) for part in parts]

    def _moved(self, target: Any) -> Any:
        return map_tensors(lambda t: t.to(self._device), target)


def _check_process_group() -> None:
    if not dist.is_initialized():
        raise UsageError(
            f"expected a process group, got none ({users_line()}); call "
            "torch.distributed.init_process_group() first, in a script that torchrun starts"
        )


def _device_of(device: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.get_backend() == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
