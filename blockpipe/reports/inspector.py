"""The stages of a pipeline as a table, and the memory that they need.

Nothing here runs a step: a report that is asked for before the first call records the model, and
does not place it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .._common.callsite import users_line
from .._common.text import bytes_text, one_line
from .._common.threads.model_turns import alone_with
from ..batches.batch_dims import has_batch
from ..batches.output_dims import is_weighed, output_dim
from ..errors import ScheduleError, UsageError
from ..preparation.memory.measured import measured
from ..preparation.memory.model import predict
from ..preparation.memory.report import MemoryReport
from ..preparation.options import PipelineOptions
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer
from ..recording.recording import Recording
from .predicted_step import option_played, predict_step, smallest_memory
from .summary.data import Prediction
from .summary.explain import explain
from .summary.summary import Summary, summarize


@dataclass(frozen=True)
class Inspector:
    """Reports on a pipeline's stages, and on the costs of a step.

    Args:
        preparer: prepares the model for steps.
        options: the options of the steps.
    """

    preparer: Preparer
    options: PipelineOptions

    def seen(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Prepared, int]:
        """Return what is prepared for these arguments, and their number of micro-batches.

        Without arguments it is what the last step had.

        Args:
            call: the call as a user writes it, for the error.
            args: the model's positional arguments.
            kwargs: the model's keyword arguments.

        Raises:
            UsageError: there are no arguments, and no step has run with these stages.
        """
        if args or kwargs:
            return self._sketched(args, kwargs)
        name = call.partition("(")[0]
        if not self.preparer.known:
            raise UsageError(
                f"{name}() needs a sample before the first call: {call} ({users_line()})"
            )
        if self.preparer.is_replanned():
            raise UsageError(
                f"the stages have been set anew since the last call, so {name}() needs a sample to "
                f"record them: {call} ({users_line()})"
            )
        prepared = next(reversed(self.preparer.known.values()))
        return prepared, prepared.microbatches or self.options.chunks

    def _sketched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Prepared, int]:
        model = self.preparer.model
        with alone_with(model):  # other threads may train it
            microbatches = self.options.split(model, args, kwargs)
            return self.preparer.sketch(microbatches[0], self.options), len(microbatches)

    def summary(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        depth: int | None,
        columns: Iterable[str] | None,
    ) -> Summary:
        """Do what :meth:`blockpipe.Pipeline.summary` says."""
        prepared, microbatches = self.seen("summary(x)", args, kwargs)
        prediction, why_not = None, []
        try:
            prediction = self._predict_step(prepared, microbatches)
        except ScheduleError as error:  # a step raises it too
            why_not.append(f"no step is predicted: {error}")
        notes = [*prepared.cautions(self.options.schedule), *prepared.notes(), *why_not]
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
        """Say what the step returns for outputs that have no entry for each sample."""
        averaged, listed = dict[str, None](), dict[str, None]()
        dim = output_dim(self.options.batch_dims)
        if dim == "list" or dim is None:
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
            yield f"{', '.join(averaged)}: one number per micro-batch, averaged by loss_reduction"
        if listed:
            yield f"{', '.join(listed)}: no entry per sample; a list with one per micro-batch"

    def explain(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Do what :meth:`blockpipe.Pipeline.explain` says."""
        prepared, _ = self.seen("explain(path, x)", args, kwargs)
        return explain(
            prepared.recording, path, devices=prepared.devices, checkpoint=self.options.checkpoint
        )

    def _predict_step(self, prepared: Prepared, microbatches: int) -> Prediction:
        step = predict_step(prepared, self.options.schedule, microbatches)
        restore_seconds = [0.0] * prepared.recording.num_stages
        for stage, seconds in zip(prepared.route, step.recompute_seconds, strict=True):
            restore_seconds[stage] += seconds
        return Prediction(
            schedule=step.simulation.schedule.name,
            microbatches=microbatches,
            step_seconds=step.simulation.makespan,
            bubble=step.simulation.bubble,
            restore_seconds=restore_seconds,
            peak_bytes=[stage.peak for stage in step.memory.stages],
            one_thread=step.is_inline and prepared.is_small,
        )

    def memory(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: object, limit: int | None
    ) -> MemoryReport:
        """Do what :meth:`blockpipe.Pipeline.memory` says."""
        prepared, microbatches = self._sketched(args, kwargs)
        if limit is None:
            limit = smallest_memory(prepared.devices)
        return self._memory_of(prepared, microbatches, optimizer, limit)

    @contextmanager
    def measured_memory(self, optimizer: object) -> Iterator[MemoryReport]:
        """Do what :meth:`blockpipe.Pipeline.measured_memory` says."""
        if not self.preparer.known:
            raise UsageError(
                "measured_memory() compares with a prediction, and the model is not placed yet "
                f"({users_line()}); pass sample=… to Pipeline, or call it once first"
            )
        prepared = next(reversed(self.preparer.known.values()))
        report = MemoryReport([], "", 0)
        stage_of = {key: home.stage for key, home in prepared.homes.items()}
        with measured(self.preparer.model, prepared.devices, stage_of, optimizer) as peaks:
            yield report
        prepared = next(reversed(self.preparer.known.values()))
        microbatches = prepared.microbatches or self.options.chunks
        found = self._memory_of(prepared, microbatches, optimizer)
        for stage in found.stages:
            stage.measured = peaks.get(stage.stage)
        vars(report).update(vars(found))

    def _memory_of(
        self, prepared: Prepared, microbatches: int, optimizer: object, limit: int | None = None
    ) -> MemoryReport:
        option = option_played(prepared, self.options.schedule, microbatches)
        return predict(prepared, option, microbatches, optimizer=optimizer, limit=limit)


def described(preparer: Preparer, options: PipelineOptions) -> str:
    """Return a pipeline's text on one screen: the model, the stages and devices, the options."""
    model, recording = type(preparer.model).__name__, preparer.recording
    parameters = sum(p.numel() for p in preparer.model.parameters())
    option = options.schedule
    name = option if isinstance(option, str) else getattr(option, "name", "a function")
    shown = [f"schedule={name!r}", f"chunks={options.chunks}"]
    usual = {"checkpoint": "never", "in_flight": None, "deferred_batch_norm": False}
    usual |= {"isolate": False}
    for option_name, value in usual.items():
        if getattr(options, option_name) != value:
            shown.append(f"{option_name}={getattr(options, option_name)!r}")
    if options.offload:
        shown.append(
            f"offload={options.offload if options.offload is True else sorted(options.offload)}"
        )
    if preparer.compiles is not None:
        shown.append("compiled")
    lines = [f"Pipeline({model}, {parameters:,} parameters, {', '.join(shown)})"]
    if recording is None:
        given = preparer.given_devices
        where = "all accelerators, or the CPU" if given is None else ", ".join(map(str, given))
        lines.append(f"  not placed yet, the first call does it; devices: {where}")
        return "\n".join(lines)
    held = (*recording.parameters, *recording.buffers)
    for stage in range(recording.num_stages):
        own = [h for h in held if h.stage == stage]
        count = sum(h.elements for h in own if not h.is_buffer)
        hops = [hop for hop in recording.hops if hop.stage == stage]
        begins = next((hop.name or hop.where.rpartition("/")[2] for hop in hops), "")
        lines.append(
            f"  stage {stage} on {preparer.devices[stage]}: {count:,} parameters, "
            f"{bytes_text(sum(h.bytes for h in own))}, begins at {begins}"
        )
    if recording.route != list(range(recording.num_stages)):
        lines.append(f"  route {recording.route}")
    return "\n".join(map(one_line, lines))
