"""The front door: a marked model as a pipeline.

What it does is elsewhere: a :class:`blockpipe.preparation.preparer.Preparer` records, plans and
places, a :class:`blockpipe.execution.step_runner.StepRunner` runs steps, by
:class:`blockpipe.preparation.options.PipelineOptions`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

import torch
from torch import nn

from ._common.callsite import remembers_caller, users_line, warn
from ._common.hints import knows_other_names
from ._common.model_turns import alone_with
from .batches.microbatch import BatchDims, LossReduction
from .devices.observer import Observer
from .errors import UsageError
from .execution.lanes import close_idle_threads
from .execution.step_result import StepResult
from .execution.step_runner import StepRunner, runs_model
from .preparation.batch_norm import synchronized
from .preparation.memory_model import MemoryReport
from .preparation.options import (
    FIXED,
    OPTIONS,
    PipelineOptions,
    as_sample,
    check_graphs,
    check_loss,
    check_model,
    checked_offload,
)
from .preparation.prepared import Prepared
from .preparation.preparer import CompileOptions, Preparer
from .recording.recording import Recording
from .reports.find_chunks import ChunksReport, SearchOptions, StepArguments, find_chunks
from .reports.inspector import Inspector, described
from .reports.summary.summary import Summary
from .reports.timeline.profiling import Profile, collected
from .reports.timeline.timeline import Timeline
from .reports.verify.result import Verification
from .reports.verify.run import Verifier
from .reports.verify.verdict import check_tolerances, verify
from .schedules.builders import ScheduleOption
from .schedules.schedule import Schedule
from .stages.plan import StagePlan
from .weights.materialize import Init, PendingValues
from .weights.module_interface import ModuleInterface
from .weights.sources import Weights

T = TypeVar("T")


class _Option(Generic[T]):
    """One of a pipeline's options, as an attribute; :meth:`Pipeline.__setattr__` assigns it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, pipe: None, owner: type) -> Self: ...
    @overload
    def __get__(self, pipe: "Pipeline", owner: type) -> T: ...

    def __get__(self, pipe: "Pipeline | None", owner: type) -> T | Self:
        return self if pipe is None else cast(T, getattr(pipe._options, self._name))

    def __set__(self, pipe: "Pipeline", value: T) -> None:
        setattr(pipe, self._name, value)


class Pipeline(ModuleInterface):
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
            Schedule``. See :func:`blockpipe.schedules.make_schedule`.
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
        batch_dims: what is split where; see :func:`blockpipe.testing.split`.
            ``None`` splits on dim 0 every tensor that has the batch's size there.
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
        super().__init__()
        self._options = PipelineOptions(
            chunks=chunks,
            schedule=schedule,
            in_flight=in_flight,
            checkpoint=checkpoint,
            offload=checked_offload(offload),
            deferred_batch_norm=deferred_batch_norm,
            batch_dims=batch_dims,
            loss_reduction=loss_reduction,
            isolate=isolate,
        )
        self._values = PendingValues(model, weights, init)
        self.module = model
        self._profile: Profile | None = None
        self._preparer = Preparer(model, devices=devices, plan=plan, values=self._values)
        several = len(set(self._preparer.given_devices or ()))
        if chunks == 1 and several > 1 and schedule != "sequential":
            warn(f"chunks=1 on {several} devices: only one works at a time; pass chunks=8 or so")
        if deferred_batch_norm and (left_alone := synchronized(model)):
            warn(
                f"deferred_batch_norm=True leaves SyncBatchNorm alone ({', '.join(left_alone)}): "
                "it is updated by each micro-batch; use BatchNorm there for what is deferred"
            )
        if sample is not None:
            args, kwargs = as_sample(sample)
            with alone_with(self.module):
                self._preparer.prepare(self._runner.split(args, kwargs)[0], self._options)

    # --- options

    chunks = _Option[int]()
    schedule = _Option[ScheduleOption]()
    in_flight = _Option[int | None]()
    checkpoint = _Option[str]()
    offload = _Option[frozenset[int] | Literal[True]]()
    deferred_batch_norm = _Option[bool]()
    batch_dims = _Option[BatchDims]()
    loss_reduction = _Option[LossReduction]()
    isolate = _Option[bool]()

    def __setattr__(self, name: str, value: Any) -> None:
        """Options may be assigned: they are checked as those of the constructor, and hold from the
        next step on."""
        if name in FIXED and "_preparer" in self.__dict__:
            raise UsageError(
                f"{name} cannot be assigned to a pipeline: {FIXED[name]} ({users_line()})"
            )
        if name in OPTIONS:  # before nn.Module takes a loss_reduction that is a module for its own
            value = checked_offload(value) if name == "offload" else value
            self._set_options(replace(self._options, **{name: value}))
        else:
            super().__setattr__(name, value)

    def _set_options(self, options: PipelineOptions) -> None:
        compiles = self._preparer.compiles
        check_graphs(
            cuda_graphs=compiles is not None and compiles.cuda_graphs,
            deferred_batch_norm=options.deferred_batch_norm,
        )
        if options.prepared_for() != self._options.prepared_for():
            self._preparer.known.clear()
        self._options = options

    @property
    def _runner(self) -> StepRunner:
        return StepRunner(self._preparer, self._options, self._observed)

    @property
    def _inspector(self) -> Inspector:
        return Inspector(self._preparer, self._options)

    # --- what is known of the model

    @property
    def recording(self) -> Recording | None:
        """The latest call's recording; ``None`` before the first call under its plan."""
        return self._preparer.recording

    @property
    def plan(self) -> StagePlan | None:
        """Which module call is on which stage; before the recording what was given, or ``None``."""
        return self._preparer.plan

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage.

        Raises:
            UsageError: no devices were given, and nothing is recorded yet.
        """
        return self._preparer.devices

    @property
    def input_device(self) -> torch.device:
        """Where the first stage is. Inputs may be anywhere: they are moved."""
        return self.devices[0]

    @property
    def output_device(self) -> torch.device:
        """Where joined outputs and the loss are: the last stage's device."""
        recording = self.recording
        return self.devices[-1 if recording is None else recording.route[-1]]

    def unplace(self) -> nn.Module:
        """Move the model's parameters and buffers back to where they were; returns the model.

        What was on the meta device stays on its stage's device: it may be larger than any other.
        """
        return self._preparer.unplace()

    # --- steps

    @remembers_caller
    @runs_model
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """One step's forwards and backwards, pipelined; gradients add up in ``.grad``.

        Args:
            *args: the model's arguments, for the whole batch.
            target: given to ``loss_fn`` after the output; split like the inputs. One that needs a
                gradient gets it, as the inputs do.
            loss_fn: ``(output, target) -> loss`` (``(output) -> loss`` without a target), one
                element. It runs in the run, on the last hop. ``None``: the model's own loss.
            return_outputs: also join the outputs.
            **kwargs: the model's keyword arguments.

        Returns:
            The batch's loss, and the outputs if asked for; both without a graph.

        Raises:
            The first exception of any micro-batch, with a note of stage, micro-batch and line.
            ``.grad`` may then hold part of the step.
        """
        check_loss(loss_fn, target)
        return self._runner.forward_backward(
            args, kwargs, target, loss_fn, return_outputs=return_outputs
        )

    @remembers_caller
    @runs_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, pipelined and differentiable, outputs joined.

        All micro-batches are alive until the loss is known, so with gradients it is always
        GPipe; :meth:`forward_backward` can hold less. Under ``no_grad`` micro-batches stream
        through the stages.
        """
        return self._runner.forward(args, kwargs)

    @remembers_caller
    @runs_model
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another method of the placed model (``generate``, ``encode``), not pipelined.

        Args:
            function: a method of the model, or anything that calls it.

        Returns:
            What the function returns.

        Raises:
            UsageError: nothing is placed yet.
        """
        return self._runner.run(function, args, kwargs)

    # --- what is where

    def recorded(
        self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Recording:
        """A recording on some arguments; without any, the newest. Nothing is placed.

        Raises:
            UsageError: there is none yet, and no arguments came.
        """
        return self._inspector.seen("get_pipeline_stage_assignment(pipe, x)", args, kwargs or {})[
            0
        ].recording

    @remembers_caller
    def summary(
        self,
        *args: Any,
        depth: int | None = None,
        columns: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> Summary:
        """What is where, and what a step is predicted to cost; records, but places nothing.

        Without arguments: of what was recorded last.

        Args:
            *args: the model's arguments, for the whole batch.
            depth: as for :meth:`Recording.summary`.
            columns: as for :meth:`Recording.summary`.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.Summary`; ``str()`` is a table,
            ``to_dict()`` data.

        Raises:
            UsageError: no arguments before the first call; an unknown column, a depth that is none.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> summary = pipe.summary(torch.ones(4, 4))
            >>> summary.parameters, summary.prediction.microbatches
            (49, 2)
        """
        return self._inspector.summary(args, kwargs, depth, columns)

    @remembers_caller
    def explain(self, path: str, *args: Any, **kwargs: Any) -> str:
        """Why a module, or a parameter, is where it is; see :meth:`Recording.explain`.

        Args:
            path: of a module, a parameter or a buffer.
            *args: the model's arguments, to record it on; none: of what was recorded last.
            **kwargs: the model's keyword arguments.

        Raises:
            UsageError: nothing of that name; no arguments before the first call.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> print(pipe.explain("1", torch.ones(4, 4)).splitlines()[0])
            1 (Linear) is on stage 1 (cpu)
        """
        return self._inspector.explain(path, args, kwargs)

    @remembers_caller
    def memory(
        self, *args: Any, optimizer: object = None, limit: int | None = None, **kwargs: Any
    ) -> MemoryReport:
        """What memory a step will need, stage by stage; records, but places nothing.

        Args:
            *args: the model's arguments, for the whole batch.
            optimizer: what trains it: a name such as ``"adamw"``, a number of copies of each
                parameter, or the optimizer itself; ``None``: none.
            limit: bytes that a device has; ``None``: what the accelerators have.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.MemoryReport`, with suggestions; printed,
            it is a table.

        Raises:
            UsageError: an optimizer that is not known.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> report = pipe.memory(torch.ones(4, 4), optimizer="adam")
            >>> report.stages[0].parameters, report.stages[0].optimizer  # 40 numbers
            (160, 320)
        """
        return self._inspector.memory(args, kwargs, optimizer, limit)

    @contextmanager
    def measured_memory(self, optimizer: object = None) -> Iterator[MemoryReport]:
        """Measure the peaks of the steps that run inside, beside the prediction.

        On an accelerator it asks the allocator, and a device's peak stands at each of its stages.
        On the CPU it counts the bytes of live tensors, which makes a step slower.

        Args:
            optimizer: as for :meth:`memory`.

        Yields:
            A :class:`blockpipe.reports.MemoryReport`, filled in at the end.

        Raises:
            UsageError: nothing is placed yet.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> x = torch.ones(4, 4)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, sample=(x,))
            >>> with pipe.measured_memory() as report:
            ...     _ = pipe.forward_backward(x, loss_fn=torch.sum)
            >>> report.stages[0].measured > report.stages[0].parameters
            True
        """
        with self._inspector.measured_memory(optimizer) as report:
            yield report

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
        given = None if cuda_graphs and not options else dict(options)
        self._preparer.compile(CompileOptions(given, cuda_graphs))

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
            A :class:`blockpipe.reports.Verification`: true if all is well; printed, a
            table.

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
        verifier = Verifier(self._runner, args, kwargs, target, loss_fn, device)
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
            A :class:`blockpipe.reports.ChunksReport`; ``report.best`` is its fastest
            trial.

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
        batch = StepArguments(args, kwargs, target, loss_fn)
        options = SearchOptions(candidates, schedules, repeats, optimizer, limit)
        return find_chunks(self._runner, batch, options)

    def __repr__(self) -> str:
        """On one screen: the model is printed by ``print(pipe.module)``."""
        return described(self._preparer, self._options)

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

    def _observed(self, prepared: Prepared, microbatches: int) -> Observer | None:
        return None if self._profile is None else self._profile.step(prepared, microbatches)

    def close(self) -> None:
        """End the threads that wait for a next step. The pipeline can be used again."""
        close_idle_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not being profiled."""
        return {**self.__dict__, "_profile": None}


def _title(schedule: ScheduleOption) -> str:
    if isinstance(schedule, str):
        return schedule
    return schedule.name if isinstance(schedule, Schedule) else "a schedule of one's own"
