"""The front door: a marked model as a pipeline.

The flow that its bases read as: record → plan → place → schedule → replay.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from .alone import alone_with
from .batchnorm import synchronized
from .chunks import Batch, ChunksReport, Options, find_chunks
from .errors import UsageError
from .hints import knows_other_names
from .inspected import described
from .lanes import close_idle_threads
from .materialize import Init
from .microbatch import BatchDims, LossReduction, Microbatch
from .observer import Observer
from .options import (
    FIXED,
    OPTIONS,
    as_sample,
    check_graphs,
    check_loss,
    check_model,
    check_options,
    checked_offload,
    prepared_for,
)
from .plan import StagePlan
from .prepared import Prepared, ScheduleOption
from .profiling import Profile, collected
from .schedule import Schedule
from .stepping import SteppedModel, runs_model
from .timeline import Timeline
from .verdict import check_tolerances, verify
from .verification import Verification
from .verifying import Verifier
from .weights import Weights
from .where import remembers_caller, users_line, warn


class Pipeline(SteppedModel):
    """Runs a marked model as a pipeline over the devices of one machine.

    Args:
        model: marked with :class:`Block`, :func:`BeginBlock` or :func:`begin_blocks`; it stays
            the user's (``pipe.module is model``), and its parameters stay the same objects.
        devices: one for each stage; a device may be named several times, and then does the work
            of several stages in turns. On the CPU each stage has a thread of its own; stages that
            are to share one have a number in common (``["cpu:0", "cpu:1", "cpu:1", "cpu:0"]``).
            ``None``: all accelerator devices of the machine, or the CPU.
        chunks: into how many micro-batches a batch is split; a batch of fewer samples makes
            fewer.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` (several stages a device),
            ``"zb-h1"`` or ``"zb-v"`` (the backward in two parts), ``"sequential"`` (one
            micro-batch at a time), ``"auto"`` (the one that is predicted to be the fastest), or
            ``"uncut"`` (one at a time, in one ordinary graph: for what the cut engine refuses); or
            a :class:`Schedule` of one's own, or a function ``(lane_of_hop, microbatches) ->
            Schedule``. See :func:`blockpipe.scheduler.make_schedule`.
        in_flight: at most so many micro-batches are under way at once; ``None``: what the schedule
            says.
        checkpoint: which micro-batches drop their activations and make them again before their
            backward: ``"never"``, ``"except_last"`` (all but the last, whose backward comes at
            once), ``"always"``. Marks with ``checkpoint=`` decide for their block. What is
            recomputed are the calls of modules that stay on one stage, and of block functions.
        offload: stages whose activations are in host memory between forward and backward;
            ``True``: all. On the CPU there is nothing to gain, and nothing is done.
        deferred_batch_norm: batch norm's running statistics are updated once a step, by those of
            the whole batch, instead of once for each micro-batch. Each micro-batch is still
            normalized by its own. ``SyncBatchNorm`` is left alone.
        plan: stages that override the marks: of each call that this model's forward makes, or
            only where stages begin (:meth:`StagePlan.from_layout`).
        sample: ``(args, kwargs)`` to record and place at once; else that is done at the first
            call.
        batch_dims: what is split where; see :func:`blockpipe.microbatch.split`. ``None`` splits
            on dim 0 every tensor that has the batch's size there.
        loss_reduction: ``"mean"``, ``"sum"``, or a callable ``(args, kwargs, target) -> number``
            that says what a micro-batch's mean is over (its number of tokens, say).
        weights: where the values of a model on the meta device come from, when it is placed: a
            path of safetensors (a file, or a sharded checkpoint's directory or index) or for
            ``torch.load``, or a mapping from names to tensors. See :func:`materialize`. A model
            that has values is loaded at once.
        init: what gives values to tensors that ``weights`` does not: a function, called with each
            module that holds such tensors, itself or in its children, or ``"reset_parameters"``.
        isolate: the stage sanitizer: slow, and proves that no operation reads another stage's
            tensor.

    ``chunks``, ``schedule``, ``in_flight``, ``checkpoint``, ``offload``, ``deferred_batch_norm``,
    ``batch_dims``, ``loss_reduction`` and ``isolate`` may be assigned later (``pipe.chunks = 8``):
    they are checked in the same way and hold from the next step on, which records the model anew
    where it depends on them. The others cannot be assigned.

    Raises:
        PlanError, ScheduleError, DeviceError, UsageError: an option that cannot be, before
            anything moves.
        WeightsError: a checkpoint that cannot be read; when the model is placed, one that does
            not fit, or tensors that are left without values.

    Source: the calls follow torchgpipe's ``GPipe``, the marks PopTorch; 1F1B is PipeDream's.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
        >>> result = pipe.forward_backward(
        ...     torch.ones(4, 4), target=torch.ones(4, 1), loss_fn=torch.nn.functional.mse_loss)
        >>> net[0].weight.grad.shape
        torch.Size([8, 4])
    """

    @knows_other_names(
        balance="mark the model, with mark_sequential(net, sizes) for example, or pass "
        "plan=balance(model, args, stages)",
        ipu_id="pass devices=, one for each stage",
        device_ids="pass devices=, one for each stage",
        microbatches="pass chunks=",
        num_microbatches="pass chunks=",
        n_microbatches="pass chunks=",
        loss_fn="pass it to forward_backward(…, target=…, loss_fn=…)",
    )
    def __init__(
        self,
        model: nn.Module,
        *,
        devices: Sequence[Any] | None = None,
        chunks: int = 1,
        schedule: ScheduleOption = "1f1b",
        in_flight: int | None = None,
        checkpoint: str = "never",
        offload: bool | Iterable[int] = False,
        deferred_batch_norm: bool = False,
        plan: StagePlan | None = None,
        sample: tuple[Any, ...] | None = None,
        batch_dims: BatchDims = None,
        loss_reduction: LossReduction = "mean",
        weights: Weights | None = None,
        init: Init | None = None,
        isolate: bool = False,
    ) -> None:
        if isinstance(model, Pipeline):
            raise UsageError("this model is a Pipeline already; pass its .module")
        check_model(model)
        options: dict[str, Any] = {
            "chunks": chunks,
            "schedule": schedule,
            "in_flight": in_flight,
            "checkpoint": checkpoint,
            "offload": offload,
            "deferred_batch_norm": deferred_batch_norm,
            "batch_dims": batch_dims,
            "loss_reduction": loss_reduction,
            "isolate": isolate,
        }
        check_options(**options)
        super().__init__(model, devices=devices, plan=plan, weights=weights, init=init, **options)
        self._profile: Profile | None = None
        if chunks == 1 and len(set(self._given_devices or ())) > 1:
            warn(
                f"chunks=1 on {len(set(self._given_devices or ()))} devices: only one works at a "
                "time; pass chunks=8 or so"
            )
        if deferred_batch_norm and (left_alone := synchronized(model)):
            warn(
                f"deferred_batch_norm=True leaves SyncBatchNorm alone ({', '.join(left_alone)}): "
                "it is updated by each micro-batch; use BatchNorm there for what is deferred"
            )
        if sample is not None:
            args, kwargs = as_sample(sample)
            with alone_with(self.module):
                self._prepare(self._split(args, kwargs, None)[0])
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Options may be assigned: they are checked as those of the constructor, and hold from the
        next step on."""
        if "_is_made" in self.__dict__:
            if name in FIXED:
                raise UsageError(
                    f"{name} cannot be assigned to a pipeline: {FIXED[name]} ({users_line()})"
                )
            if name in OPTIONS:
                value = checked_offload(value) if name == "offload" else value
                before = {option: getattr(self, option) for option in OPTIONS}
                options = before | {name: value}
                check_options(**options)
                check_graphs(
                    cuda_graphs=self._compile is not None and self._compile[1],
                    deferred_batch_norm=options["deferred_batch_norm"],
                )
                if prepared_for(options) != prepared_for(before):
                    self._prepared.clear()
        super().__setattr__(name, value)

    @remembers_caller
    def compile(self, *, cuda_graphs: bool = False, **options: Any) -> None:
        """Compile the modules that stay on one stage, each for itself.

        Done at the next call, in one thread. The model itself stays as it is: what is compiled
        stands in for its modules during the pipeline's steps. Modules without parameters are left
        alone.

        Args:
            cuda_graphs: capture each of them as CUDA graphs, one for each micro-batch in flight, so
                that launching kernels costs next to nothing. Their shapes are those of the next
                call; calls of other shapes run as without. Memory of what is in flight stays
                allocated. ``pipe(x)`` with gradients does without.
            **options: for :func:`torch.compile` (``backend``, ``mode``, ``dynamic`` …). With
                ``cuda_graphs=True`` and no option nothing is compiled, only captured.

        Raises:
            UsageError: ``cuda_graphs`` without a CUDA device, or with ``deferred_batch_norm``.

        Source: :func:`torch.compile`, :func:`torch.cuda.make_graphed_callables`.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> pipe.compile(backend="eager")
            >>> pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum).loss.shape
            torch.Size([])
        """
        check_graphs(cuda_graphs=cuda_graphs, deferred_batch_norm=self.deferred_batch_norm)
        if cuda_graphs and not torch.cuda.is_available():
            raise UsageError(
                "cuda_graphs=True needs a CUDA device, and this machine has none; compile() "
                f"without it works on every device ({users_line()})"
            )
        self._compile = (None if cuda_graphs and not options else dict(options), cuda_graphs)
        for prepared in self._prepared.values():
            self._compile_modules(prepared)

    # --- whether it is right, and fast

    @remembers_caller
    @runs_model
    def verify(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        device: Any = None,
        whole: bool = True,
        **kwargs: Any,
    ) -> Verification:
        """Run a small batch pipelined and as a plain loop, and compare all that comes out.

        Outputs, loss, gradients of parameters and inputs, buffers. Where they differ, both are run
        again with every module call watched, and the first module and stage where they part is
        named. The model, its gradients and buffers and the random generators are left as they
        were; nothing is trained. Under ``no_grad`` the forward alone is compared. Then outputs,
        loss and gradients are compared with those of the whole batch in one forward, to rounding:
        only that shows a wrong split or a wrong weighting.

        The schedule runs on its lanes even where operations are so small that a step would take one
        thread. With ``deferred_batch_norm`` the plain loop defers as well. Random numbers are drawn
        from the same streams; where stages on different devices draw, the reference is one uncut
        graph over the stages.

        Args:
            *args: the model's arguments, for the whole batch.
            target: as for :meth:`forward_backward`.
            loss_fn: as for :meth:`forward_backward`; ``None``: the model's own loss, or the mean
                square of its outputs if it has none.
            rtol: how far apart things may be where equality to the bit is not promised (anything
                on an accelerator, or compiled), relative to the plain run's norm; gradients
                relative to the norm of all of them. ``None``: 1e-5, for single precision.
            atol: the same, absolute.
            device: where the plain run is: it needs room for the whole model. ``None``: the first
                stage's. ``"stages"``: one uncut graph over the stages, for a model that fits no
                device.
            whole: also compare with the whole batch in one forward; where it does not fit, or
                draws random numbers in evaluation mode too, a note says so. A model that draws, or
                has batch norm, is put into evaluation mode for this.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.verification.Verification`: true if all is well; printed, a table.

        Raises:
            UsageError: a target without a loss_fn, a tolerance that is no number.
            The first exception of either run.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> found = pipe.verify(torch.ones(4, 4))
            >>> found.ok, found.verdict
            (True, 'exact')
        """
        check_loss(loss_fn, target)
        check_tolerances(rtol, atol)
        verifier = Verifier(self, args, kwargs, target, loss_fn, device)
        return verify(verifier, rtol=rtol, atol=atol, whole=whole)

    @remembers_caller
    @runs_model
    def find_chunks(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        candidates: Iterable[int] | None = None,
        schedules: Iterable[ScheduleOption] | ScheduleOption | None = None,
        repeats: int = 5,
        optimizer: object = None,
        limit: int | None = None,
        **kwargs: Any,
    ) -> ChunksReport:
        """Try numbers of micro-batches on a batch, side by side, and say which is the fastest.

        The pipeline's own ``chunks`` and ``schedule`` stay as they are, and so does the model:
        parameters, gradients, buffers, random generators.

        Args:
            *args: the model's arguments, for the whole batch: one of the size that is trained on.
            target: as for :meth:`forward_backward`.
            loss_fn: as for :meth:`forward_backward`.
            candidates: what to try; ``None``: powers of two up to eight for each stage, and the
                pipeline's own. A batch of fewer samples makes fewer micro-batches; each number
                that results is tried once.
            schedules: under which; ``None``: the pipeline's own.
            repeats: steps of each; the median counts.
            optimizer: what trains it, for the memory; as for :meth:`memory`.
            limit: bytes that a device has; what is predicted to need more is not tried. ``None``:
                what the accelerators have; on the CPU there is none.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.chunks.ChunksReport`; ``report.best`` is its fastest trial.

        Raises:
            UsageError: a candidate that is no number from 1 on.
            The first exception of a step, where every candidate fails. One that fails alone is told
            in the report: batch norm of a single sample, say.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> report = pipe.find_chunks(torch.ones(4, 4), loss_fn=torch.sum, repeats=1)
            >>> [trial.microbatches for trial in report.trials]
            [1, 2, 4]
        """
        check_loss(loss_fn, target)

        def step() -> None:
            self.forward_backward(*args, target=target, loss_fn=loss_fn, **kwargs)

        batch = Batch(args, kwargs, target, loss_fn)
        options = Options(candidates, schedules, repeats, optimizer, limit)
        return find_chunks(self, step, batch, options)

    def __repr__(self) -> str:
        """On one screen: the model is printed by ``print(pipe.module)``."""
        return described(self)

    @contextmanager
    def profile(self) -> Iterator[Timeline]:
        """Note what happens when in the steps that run inside: actions, copies and waits.

        Calls under ``no_grad`` are steps too, and ``pipe(x)`` with its backward is one. On an
        accelerator times are those of events on its streams. Run a step before: the first one
        records, and is slower.

        Yields:
            A :class:`blockpipe.Timeline`, filled at the end; where a step fails, with what was
            collected until then.

        Raises:
            UsageError: the pipeline is being profiled already.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> with pipe.profile() as t:
            ...     _ = pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
            >>> sorted(map(str, t.actions()))
            ['B0.0', 'B0.1', 'B1.0', 'B1.1', 'F0.0', 'F0.1', 'F1.0', 'F1.1']
        """
        if self._profile is not None:
            raise UsageError(
                "this pipeline is being profiled already, and a step has one timeline; leave the "
                f"outer profile() first, or use its timeline ({users_line()})"
            )
        self._profile = Profile(Timeline(title=_title(self.schedule)))
        try:
            with collected(self._profile) as timeline:
                yield timeline
        finally:
            self._profile = None

    def _observer(self, prepared: Prepared, microbatches: list[Microbatch]) -> Observer | None:
        if self._profile is None:
            return None
        return self._profile.step(prepared, len(microbatches))

    def close(self) -> None:
        """End the threads that wait for a next step. The pipeline can be used again."""
        close_idle_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not being profiled."""
        return {**super().__getstate__(), "_profile": None}


def _title(schedule: ScheduleOption) -> str:
    if isinstance(schedule, str):
        return schedule
    return schedule.name if isinstance(schedule, Schedule) else "a schedule of one's own"
