"""A placed model that says what is where: its stages as a table, and the memory they need.

Nothing here runs a step: what is asked before the first call records, and places nothing.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .errors import ScheduleError, UsageError
from .explain import explain
from .joining import has_batch, is_weighed, output_dim
from .memory import MemoryReport, measured, predict
from .microbatch import BatchDims, Microbatch, dims_of_call, split
from .placed import PlacedModel
from .prepared import Prepared
from .recording import Recording
from .simulate import simulate
from .summary import Prediction, Summary, summarize
from .table import bytes_text, one_line
from .transfer import is_asynchronous
from .where import remembers_caller, users_line


class InspectedModel(PlacedModel):
    """A placed model, and how its batches are split.

    Args:
        model: the user's.
        chunks: into how many micro-batches a batch is split.
        batch_dims: what is split where.
        **options: as for :class:`blockpipe.placed.PlacedModel`.
    """

    def __init__(
        self, model: nn.Module, *, chunks: int, batch_dims: BatchDims, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.chunks = chunks
        self.batch_dims = batch_dims

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> list[Microbatch]:
        cut = self.schedule != "uncut"
        return split(args, kwargs, target, self.chunks, self._dims(args, kwargs), cut=cut)

    def _dims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchDims:
        """``batch_dims`` as these arguments are passed."""
        if not isinstance(self.batch_dims, Mapping):
            return self.batch_dims
        parameters = inspect.signature(self.module.forward).parameters
        return dims_of_call(self.batch_dims, parameters, args, kwargs)

    @contextmanager
    def _as_if(self, **options: Any) -> Iterator[None]:
        """While entered, other options hold (``chunks``, ``schedule`` …), and steps are prepared
        anew for them; then everything is as it was."""
        changed = {**options, "_prepared": OrderedDict()}
        before = {name: getattr(self, name) for name in changed}
        try:
            vars(self).update(changed)  # one by one, some would not go with others
            yield
        finally:
            vars(self).update(before)

    # --- what is where

    def recorded(
        self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Recording:
        """A recording on some arguments; without any, the newest. Nothing is placed.

        Raises:
            UsageError: there is none yet, and no arguments came.
        """
        prepared, _ = self._seen("get_pipeline_stage_assignment(pipe, x)", args, kwargs or {})
        return prepared.recording

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
            A :class:`blockpipe.summary.Summary`; ``str()`` is a table, ``to_dict()`` data.

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
        prepared, microbatches = self._seen("summary(x)", args, kwargs)
        prediction, why_not = None, []
        try:
            prediction = self._predict_step(prepared, microbatches)
        except ScheduleError as error:  # of the user's own schedule: a step will raise it
            why_not.append(f"no step is predicted: {error}")
        notes = [*prepared.cautions(self.schedule), *prepared.notes(), *why_not]
        if microbatches > 1:
            notes += self._joined(prepared.recording)
        return summarize(
            prepared.recording,
            depth=depth,
            columns=columns,
            devices=prepared.devices,
            rates=prepared.rates,
            prediction=prediction,
            notes=notes,
        )

    def _joined(self, recording: Recording) -> Iterator[str]:
        """What becomes of outputs that have no entry for each sample."""
        averaged, listed = dict[str, None](), dict[str, None]()
        dim = output_dim(self.batch_dims)
        if dim == "list":
            return
        for output in recording.outputs:
            dtype = getattr(torch, output.dtype)
            is_batch = has_batch(output.shape, recording.samples or 0, dim)
            if is_batch or output.is_loss or output.is_given:
                continue
            if is_weighed(output.shape, dtype):
                averaged[output.name] = None
            elif not output.shape or dtype.is_floating_point or dtype.is_complex:
                listed[output.name] = None
        if averaged:
            yield f"{', '.join(averaged)}: a number a micro-batch, averaged by loss_reduction"
        if listed:
            yield f"{', '.join(listed)}: no entry for each sample; a list, one entry a micro-batch"

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
        prepared, _ = self._seen("explain(path, x)", args, kwargs)
        return explain(
            prepared.recording, path, devices=prepared.devices, checkpoint=self.checkpoint
        )

    def _seen(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Prepared, int]:
        """What is prepared for these arguments, or was last; and for how many micro-batches."""
        if args or kwargs:
            microbatches = self._split(args, kwargs, None)
            return self._sketched(microbatches[0]), len(microbatches)
        name = call.partition("(")[0]
        if not self._prepared:
            raise UsageError(
                f"{name}() needs a sample before the first call: {call} ({users_line()})"
            )
        if self._is_replanned():
            raise UsageError(
                f"the stages were set anew since the last call, and {name}() needs a sample to "
                f"record them: {call} ({users_line()})"
            )
        prepared = next(reversed(self._prepared.values()))
        return prepared, prepared.microbatches or self.chunks

    def _predict_step(self, prepared: Prepared, microbatches: int) -> Prediction:
        """A step played out."""
        memory = self._predicted(prepared, microbatches, None, None)
        one_by_one = prepared.goes_one_by_one(self.schedule, microbatches)
        made = prepared.schedule("sequential" if one_by_one else self.schedule, microbatches)
        costs = prepared.costs
        played = simulate(made, costs)
        restore = [0.0] * prepared.recording.num_stages
        assert isinstance(costs.restore, list)
        for stage, seconds in zip(prepared.route, costs.restore, strict=True):
            restore[stage] += seconds
        return Prediction(
            made.name,
            microbatches,
            played.makespan,
            played.bubble,
            restore,
            [stage.peak for stage in memory.stages],
            one_thread=one_by_one and prepared.is_small,
        )

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
            A :class:`blockpipe.memory.MemoryReport`, with suggestions; printed, it is a table.

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
        microbatches = self._split(args, kwargs, None)
        prepared = self._sketched(microbatches[0])
        if limit is None and prepared.is_asynchronous:
            accelerators = [device for device in prepared.devices if is_asynchronous(device)]
            limit = min(torch.accelerator.get_memory_info(d)[1] for d in accelerators)
        return self._predicted(prepared, len(microbatches), optimizer, limit)

    @contextmanager
    def measured_memory(self, optimizer: object = None) -> Iterator[MemoryReport]:
        """Measure the peaks of the steps that run inside, beside the prediction.

        On an accelerator it asks the allocator, and a device's peak stands at each of its stages.
        On the CPU it counts the bytes of live tensors, which makes a step slower.

        Args:
            optimizer: as for :meth:`memory`.

        Yields:
            A :class:`blockpipe.memory.MemoryReport`, filled in at the end.

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
        if not self._prepared:
            raise UsageError(
                "measured_memory() compares with the recording of a placed model; pass sample=… "
                "to Pipeline, or call it once first"
            )
        prepared = next(reversed(self._prepared.values()))
        report = MemoryReport([], "", 0)
        stage_of = {key: home.stage for key, home in prepared.homes.items()}
        with measured(self.module, prepared.devices, stage_of, optimizer) as peaks:
            yield report
        prepared = next(reversed(self._prepared.values()))
        found = self._predicted(prepared, prepared.microbatches or self.chunks, optimizer, None)
        for stage in found.stages:
            stage.measured = peaks.get(stage.stage)
        vars(report).update(vars(found))

    def _predicted(
        self, prepared: Prepared, microbatches: int, optimizer: object, limit: int | None
    ) -> MemoryReport:
        one_by_one = prepared.goes_one_by_one(self.schedule, microbatches)
        schedule = "sequential" if one_by_one else self.schedule
        return predict(prepared, schedule, microbatches, optimizer=optimizer, limit=limit)


def described(pipe: InspectedModel) -> str:
    """A pipeline on one screen: the model, the stages and their devices, the options."""
    model, recording = type(pipe.module).__name__, pipe.recording
    parameters = sum(p.numel() for p in pipe.module.parameters())
    option = pipe.schedule
    name = option if isinstance(option, str) else getattr(option, "name", "one's own")
    options = [f"schedule={name!r}", f"chunks={pipe.chunks}"]
    usual = {"checkpoint": "never", "in_flight": None, "deferred_batch_norm": False}
    usual |= {"isolate": False}
    for option_name, value in usual.items():
        if getattr(pipe, option_name) != value:
            options.append(f"{option_name}={getattr(pipe, option_name)!r}")
    if pipe.offload:
        options.append(f"offload={pipe.offload if pipe.offload is True else sorted(pipe.offload)}")
    if pipe._compile is not None:
        options.append("compiled")
    lines = [f"Pipeline({model}, {parameters:,} parameters, {', '.join(options)})"]
    if recording is None:
        given = pipe._given_devices
        where = "all accelerators, or the CPU" if given is None else ", ".join(map(str, given))
        lines.append(f"  not placed yet: it is at the first call; devices: {where}")
        return "\n".join(lines)
    held = (*recording.parameters, *recording.buffers)
    for stage in range(recording.num_stages):
        own = [h for h in held if h.stage == stage]
        count = sum(h.elements for h in own if not h.is_buffer)
        hops = [hop for hop in recording.hops if hop.stage == stage]
        begins = next((hop.name or hop.where.rpartition("/")[2] for hop in hops), "")
        lines.append(
            f"  stage {stage} on {pipe.devices[stage]}: {count:,} parameters, "
            f"{bytes_text(sum(h.bytes for h in own))}, begins at {begins}"
        )
    if recording.route != list(range(recording.num_stages)):
        lines.append(f"  route {recording.route}")
    return "\n".join(map(one_line, lines))
