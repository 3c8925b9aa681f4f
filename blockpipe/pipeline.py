"""The front door: a marked model as a pipeline.

The work is done elsewhere: a :class:`~blockpipe.preparation.preparer.Preparer` records, plans and
places, and a :class:`~blockpipe.execution.step_runner.StepRunner` runs steps, both by the same
:class:`~blockpipe.preparation.options.PipelineOptions`. The public methods that report something
are in :class:`~blockpipe.reports.report_methods.ReportMethods`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import nn

from ._common.callsite import remembers_caller, users_line, warn
from ._common.checks import near_miss
from ._common.hints import knows_other_names
from ._common.threads.model_turns import alone_with
from ._torch.modes import untraced
from .batches.batch_dims import BatchDims
from .batches.microbatch import LossReduction
from .devices.devices import Devices
from .errors import UsageError
from .execution.lanes.thread_pool import close_idle_threads
from .execution.microbatch.container_entries import PassedContainers
from .execution.scaled_gradients import current_scale
from .execution.step_result import StepResult
from .execution.step_runner import runs_model
from .preparation.batch_norm.deferred import synchronized
from .preparation.options import (
    FIXED,
    OPTIONS,
    Option,
    PipelineOptions,
    as_sample,
    check_graphs,
    check_loss,
    check_model,
    check_reduction,
    checked_offload,
    joined_kwargs,
)
from .preparation.preparer import CompileOptions, Preparer
from .recording.recording import Recording
from .reports.inspector import described
from .reports.report_methods import ReportMethods
from .schedules.builders import ScheduleOption
from .stages.plan import StagePlan
from .weights.materialize import Init, PendingValues
from .weights.module_interface import ModuleInterface, with_models_signature
from .weights.sources import Weights


class Pipeline(ReportMethods, ModuleInterface):
    """Runs a marked model as a pipeline over the devices of one machine.

    Args:
        model: the model, marked with :class:`Block`, :func:`BeginBlock` or :func:`begin_blocks`.
            It stays the user's (``pipe.module is model``), and its parameters stay the same
            objects.
        devices: a device for each stage. A device may be named several times; its stages then take
            turns. On the CPU each stage has a thread of its own; stages that are to share one
            have a number in common (``["cpu:0", "cpu:1", "cpu:1", "cpu:0"]``). A number takes
            that many accelerator devices of the machine, or on a machine without any the CPU for
            that many stages; ``None`` and ``"auto"`` take all.
        chunks: the number of micro-batches that a batch is split into; a batch of fewer samples
            makes fewer.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` (several stages a device),
            ``"zb-h1"`` or ``"zb-v"`` (the backward in two parts), ``"sequential"`` (one
            micro-batch at a time), ``"auto"`` (the one that is predicted to be the fastest), or
            ``"uncut"`` (one at a time, in one ordinary graph: for models that the other schedules
            refuse); or a :class:`Schedule` of your own, or a function
            ``(lane_of_hop, microbatches) -> Schedule``. See
            :func:`blockpipe.schedules.make_schedule`.
        in_flight: the most micro-batches that are under way at once; ``None`` leaves it to the
            schedule.
        checkpoint: the micro-batches that drop their activations and recompute them before their
            backward: ``"never"``, ``"except_last"`` (all but the last, whose backward follows at
            once), ``"always"``. Marks with ``checkpoint=`` decide for their block. Calls of modules
            that stay on one stage, and of block functions, are recomputed.
        offload: the stages whose activations are in host memory between forward and backward;
            ``True`` for all. On the CPU there is nothing to gain, and nothing is done.
        deferred_batch_norm: whether batch norm's running statistics are updated once a step, by
            those of the whole batch, instead of once for each micro-batch. Each micro-batch is
            still normalized by its own. ``SyncBatchNorm`` is left alone.
        plan: stages that override the marks: of each call that this model's forward makes, or
            only where stages begin (:meth:`StagePlan.from_layout`).
        sample: ``(args, kwargs)`` to record and place the model at once, and not at the first call.
        batch_dims: the dim on which each argument is split; see :func:`blockpipe.testing.split`.
            ``None`` splits on dim 0 every tensor that has the batch's size there.
        loss_reduction: ``"mean"``, ``"sum"``, or a callable ``(args, kwargs, target) -> number``
            that returns what a micro-batch's mean is taken over (its number of tokens, say). With
            ``"mean"``, micro-batches count by their samples, or by the class weights of their
            targets where the loss function is torch's ``CrossEntropyLoss`` or ``NLLLoss`` with
            ``weight``.
        weights: the values of a model on the meta device, read when it is placed: a path of
            safetensors (a file, or a sharded checkpoint's directory or index) or for
            ``torch.load``, or a mapping from names to tensors. See :func:`materialize`. A model
            that has values already is loaded at once.
        init: gives values to tensors that are not in ``weights``: a function, called with each
            module that holds such tensors, itself or in its children, or ``"reset_parameters"``.
        isolate: whether the stage sanitizer is on: it is slow, and proves that no operation reads
            another stage's tensor.

    ``chunks``, ``schedule``, ``in_flight``, ``checkpoint``, ``offload``, ``deferred_batch_norm``,
    ``batch_dims``, ``loss_reduction`` and ``isolate`` may be assigned later (``pipe.chunks = 8``).
    They are checked in the same way and take effect from the next step on, which records the model
    anew if the recording depends on them. The others cannot be assigned.

    Raises:
        PlanError, ScheduleError, DeviceError, UsageError: an option is wrong, or does not go with
            another one. Nothing has been moved then.
        WeightsError: a checkpoint cannot be read; when the model is placed, it does not fit, or
            leaves tensors without values.

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
        batch_size="a call's arguments are the batch; pass chunks= for the number of its parts",
        device="pass devices=, one for each stage",
        device_map="call blockpipe.from_device_map(model, device_map)",
        micro_batches="pass chunks=",
        micro_batch_size="a call's arguments are the batch; pass chunks= for the number of parts",
        recompute="pass checkpoint=",
        activation_checkpointing="pass checkpoint=",
        example_inputs="pass sample=",
        dtype="a pipeline has its model's: model.to(dtype), or torch.autocast around a call",
        precision="a pipeline has its model's: model.to(dtype), or torch.autocast around a call",
        amp="write torch.autocast around a call",
        gradient_accumulation_steps="pass chunks=, or call forward_backward several times",
        optimizer="call its step() after forward_backward; a pipeline has none",
        num_stages="the marks say it; for a plan pass plan=balance(model, args, stages)",
        stages="the marks say it; for a plan pass plan=balance(model, args, stages)",
        n_stages="the marks say it; for a plan pass plan=balance(model, args, stages)",
        partitions="mark the model, with mark_sequential(net, sizes) for example",
    )
    def __init__(
        self,
        model: nn.Module,
        *,
        devices: Devices = None,
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
        self._preparer = Preparer(model, devices=devices, plan=plan, values=self._values)
        self._passed = PassedContainers()
        self._warn_of_idle_options()
        if sample is not None:
            args, kwargs = as_sample(sample)
            with alone_with(self.module):
                self._preparer.prepare(self._runner.split(args, kwargs)[0], self._options)

    def _warn_of_idle_options(self) -> None:
        """Warn where an option that was given can do nothing, or not what it is for."""
        several = len(set(self._preparer.given_devices or ()))
        if self.chunks == 1 and several > 1 and self.schedule != "sequential":
            warn(
                f"chunks=1 on {several} devices: only one works at a time; pass chunks=8, say, to "
                "cut a batch into 8 micro-batches"
            )
        if self.deferred_batch_norm and (left_alone := synchronized(self.module)):
            warn(
                f"deferred_batch_norm=True leaves SyncBatchNorm alone ({', '.join(left_alone)}): "
                "each micro-batch updates it; use BatchNorm where statistics are to be deferred"
            )

    # --- options

    chunks = Option[int]()
    schedule = Option[ScheduleOption]()
    in_flight = Option[int | None]()
    checkpoint = Option[str]()
    offload = Option[frozenset[int] | Literal[True]]()
    deferred_batch_norm = Option[bool]()
    batch_dims = Option[BatchDims]()
    loss_reduction = Option[LossReduction]()
    isolate = Option[bool]()

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an option: it is checked as in the constructor, and takes effect from the next
        step on."""
        if name in FIXED and "_preparer" in self.__dict__:
            raise UsageError(
                f"{name} cannot be assigned to a pipeline: {FIXED[name]} ({users_line()})"
            )
        if name in OPTIONS:  # before nn.Module takes a loss_reduction that is a module for its own
            value = checked_offload(value) if name == "offload" else value
            self._set_options(replace(self._options, **{name: value}))
            return
        is_new = not name.startswith("_") and name not in self.__dict__
        if is_new and not hasattr(type(self), name):  # a slip would change nothing, and say nothing
            meant = near_miss(name, OPTIONS)
            if meant is not None:
                raise UsageError(
                    f"a pipeline has no option {name!r} ({users_line()}); did you mean {meant!r}?"
                )
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

    @contextmanager
    def _splits_by(self, dims: BatchDims) -> Iterator[None]:
        """While entered, arguments are split by other ``batch_dims`` than the user's."""
        before, self._options = self._options, replace(self._options, batch_dims=dims)
        try:
            yield
        finally:
            self._options = before

    # --- what is known of the model

    @property
    def recording(self) -> Recording | None:
        """The recording of the latest call; ``None`` before the first call under the plan."""
        return self._preparer.recording

    @property
    def plan(self) -> StagePlan | None:
        """The stage of each module call; before a recording the plan given, or ``None``."""
        return self._preparer.plan

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage.

        Raises:
            UsageError: no devices were given, and nothing has been recorded yet.
        """
        return self._preparer.devices

    @property
    def _stage_devices(self) -> list[torch.device]:
        return self._preparer.expected_devices

    @property
    def input_device(self) -> torch.device:
        """The first stage's device. Inputs may be on any device: they are moved."""
        return self.devices[0]

    @property
    def output_device(self) -> torch.device:
        """The last stage's device, where joined outputs and the loss are."""
        recording = self.recording
        return self.devices[-1 if recording is None else recording.route[-1]]

    def unplace(self) -> nn.Module:
        """Move the model's parameters and buffers back to where they were; return the model.

        Tensors that were on the meta device stay on their stages' devices: all of them together may
        fit on no single device.
        """
        return self._preparer.unplace()

    # --- steps

    @untraced
    @remembers_caller
    @runs_model
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run a step's forwards and backwards, pipelined; gradients add up in ``.grad``.

        Args:
            *args: the model's arguments, for the whole batch.
            target: the second argument of ``loss_fn``; split like the inputs. If it needs a
                gradient it gets one, as the inputs do.
            loss_fn: ``(output, target) -> loss`` (``(output) -> loss`` without a target), which
                returns one element. It runs for each micro-batch, on the last stage that the
                forward visits. ``None`` takes the model's own loss.
            return_outputs: whether to return the joined outputs too.
            model_kwargs: keyword arguments of the model that have the name of one of these:
                ``model_kwargs={"target": y}``.
            **kwargs: the model's keyword arguments.

        Returns:
            The batch's loss, and the outputs if they were asked for; both without a graph.

        Raises:
            The first exception of any micro-batch, with a note that names the stage, the
            micro-batch and the line. ``.grad`` may then hold part of the step.
        """
        check_loss(loss_fn, target, kwargs)
        self._check_forward(is_scaled=current_scale() is not None)
        kwargs = joined_kwargs(kwargs, model_kwargs)
        check_reduction(loss_fn, kwargs, self.loss_reduction, self.chunks)
        return replace(self._runner, passed=self._passed).forward_backward(
            args, kwargs, target, loss_fn, return_outputs=return_outputs
        )

    @with_models_signature
    @untraced
    @remembers_caller
    @runs_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, pipelined and differentiable; return the joined outputs.

        All micro-batches are kept until the caller's backward, so with gradients the schedule is
        always GPipe; :meth:`forward_backward` can hold less. Under ``no_grad`` micro-batches stream
        through the stages.
        """
        check_reduction(None, kwargs, self.loss_reduction, self.chunks)
        return replace(self._runner, passed=self._passed).forward(args, kwargs)

    @untraced
    @remembers_caller
    @runs_model
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another method of the placed model (``generate``, ``encode``), not pipelined.

        Args:
            function: a method of the model, or any function that calls it.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Returns:
            The function's result.

        Raises:
            UsageError: the model is not placed yet.
        """
        return self._runner.run(function, args, kwargs)

    @remembers_caller
    def compile(self, *, cuda_graphs: bool = False, **options: Any) -> None:
        """Compile the modules that stay on one stage, each for itself.

        They are compiled at the next call, in one thread. The model itself stays as it is: the
        compiled modules stand in for its own during the pipeline's steps. Modules without
        parameters are left alone.

        Args:
            cuda_graphs: whether to capture each of them as CUDA graphs, one for each micro-batch in
                flight, so that launching kernels costs next to nothing. The shapes are those of the
                next call; calls of other shapes, and ``pipe(x)`` with gradients, run without
                graphs. Memory for all micro-batches in flight stays allocated. A module that
                changes plain values of its own or writes to what it is given is not captured: a
                replay has no Python. The summary lists those, and what CUDA refuses.
            **options: options of :func:`torch.compile` (``backend``, ``mode``, ``dynamic`` …). With
                ``cuda_graphs=True`` and no option, modules are captured and not compiled.

        Raises:
            UsageError: ``cuda_graphs`` is asked for without a CUDA device, or with
                ``deferred_batch_norm``.

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
                "cuda_graphs=True needs a CUDA device, and this machine has none "
                f"({users_line()}); compile() without it works on every device"
            )
        given = None if cuda_graphs and not options else dict(options)
        self._preparer.compile(CompileOptions(given, cuda_graphs))

    def __repr__(self) -> str:
        """Describe the pipeline on one screen; ``print(pipe.module)`` prints the model."""
        return described(self._preparer, self._options)

    def close(self) -> None:
        """End the threads that wait for the next step. The pipeline can still be used."""
        close_idle_threads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is not being profiled."""
        return {**self.__dict__, "_profile": None, "_observes": None}
