"""What is where: the stages as a table, and the memory they need.

Nothing here runs a step: what is asked before the first call records, and places nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .._common.callsite import users_line
from .._common.text import bytes_text, one_line
from ..batches.joining import has_batch, is_weighed, output_dim
from ..devices.devices import is_asynchronous
from ..errors import ScheduleError, UsageError
from ..preparation.memory_model import MemoryReport, measured, predict
from ..preparation.options import PipelineOptions
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer, split_call
from ..recording.recording import Recording
from ..schedules.simulation import simulate
from .summary.data import Prediction
from .summary.explain import explain
from .summary.summary import Summary, summarize


@dataclass(frozen=True)
class Inspector:
    """Says what is where, and what a step will cost.

    Args:
        preparer: of the model.
        options: of the steps.
    """

    preparer: Preparer
    options: PipelineOptions

    def seen(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Prepared, int]:
        """What is prepared for these arguments, or was last; and for how many micro-batches."""
        if args or kwargs:
            microbatches = split_call(self.preparer.model, self.options, args, kwargs, None)
            return self.preparer.sketch(microbatches[0], self.options), len(microbatches)
        name = call.partition("(")[0]
        if not self.preparer.known:
            raise UsageError(
                f"{name}() needs a sample before the first call: {call} ({users_line()})"
            )
        if self.preparer.is_replanned():
            raise UsageError(
                f"the stages were set anew since the last call, and {name}() needs a sample to "
                f"record them: {call} ({users_line()})"
            )
        prepared = next(reversed(self.preparer.known.values()))
        return prepared, prepared.microbatches or self.options.chunks

    def summary(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        depth: int | None,
        columns: Iterable[str] | None,
    ) -> Summary:
        """As :meth:`blockpipe.Pipeline.summary`."""
        prepared, microbatches = self.seen("summary(x)", args, kwargs)
        prediction, why_not = None, []
        try:
            prediction = self._predict_step(prepared, microbatches)
        except ScheduleError as error:  # of the user's own schedule: a step will raise it
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
        """What becomes of outputs that have no entry for each sample."""
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
            yield f"{', '.join(averaged)}: a number a micro-batch, averaged by loss_reduction"
        if listed:
            yield f"{', '.join(listed)}: no entry for each sample; a list, one entry a micro-batch"

    def explain(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """As :meth:`blockpipe.Pipeline.explain`."""
        prepared, _ = self.seen("explain(path, x)", args, kwargs)
        return explain(
            prepared.recording, path, devices=prepared.devices, checkpoint=self.options.checkpoint
        )

    def _predict_step(self, prepared: Prepared, microbatches: int) -> Prediction:
        """A step played out."""
        memory = self._predicted(prepared, microbatches, None, None)
        one_by_one = prepared.runs_inline(self.options.schedule, microbatches)
        made = prepared.schedule(
            "sequential" if one_by_one else self.options.schedule, microbatches
        )
        costs = prepared.costs
        played = simulate(made, costs)
        recompute = [0.0] * prepared.recording.num_stages
        assert isinstance(costs.recompute, list)
        for stage, seconds in zip(prepared.route, costs.recompute, strict=True):
            recompute[stage] += seconds
        return Prediction(
            made.name,
            microbatches,
            played.makespan,
            played.bubble,
            recompute,
            [stage.peak for stage in memory.stages],
            one_thread=one_by_one and prepared.is_small,
        )

    def memory(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: object, limit: int | None
    ) -> MemoryReport:
        """As :meth:`blockpipe.Pipeline.memory`."""
        microbatches = split_call(self.preparer.model, self.options, args, kwargs, None)
        prepared = self.preparer.sketch(microbatches[0], self.options)
        if limit is None and prepared.is_asynchronous:
            accelerators = [device for device in prepared.devices if is_asynchronous(device)]
            limit = min(torch.accelerator.get_memory_info(d)[1] for d in accelerators)
        return self._predicted(prepared, len(microbatches), optimizer, limit)

    @contextmanager
    def measured_memory(self, optimizer: object) -> Iterator[MemoryReport]:
        """As :meth:`blockpipe.Pipeline.measured_memory`."""
        if not self.preparer.known:
            raise UsageError(
                "measured_memory() compares with the recording of a placed model; pass sample=… "
                "to Pipeline, or call it once first"
            )
        prepared = next(reversed(self.preparer.known.values()))
        report = MemoryReport([], "", 0)
        stage_of = {key: home.stage for key, home in prepared.homes.items()}
        with measured(self.preparer.model, prepared.devices, stage_of, optimizer) as peaks:
            yield report
        prepared = next(reversed(self.preparer.known.values()))
        found = self._predicted(
            prepared, prepared.microbatches or self.options.chunks, optimizer, None
        )
        for stage in found.stages:
            stage.measured = peaks.get(stage.stage)
        vars(report).update(vars(found))

    def _predicted(
        self, prepared: Prepared, microbatches: int, optimizer: object, limit: int | None
    ) -> MemoryReport:
        one_by_one = prepared.runs_inline(self.options.schedule, microbatches)
        schedule = "sequential" if one_by_one else self.options.schedule
        return predict(prepared, schedule, microbatches, optimizer=optimizer, limit=limit)


def described(preparer: Preparer, options: PipelineOptions) -> str:
    """A pipeline on one screen: the model, the stages and their devices, the options."""
    model, recording = type(preparer.model).__name__, preparer.recording
    parameters = sum(p.numel() for p in preparer.model.parameters())
    option = options.schedule
    name = option if isinstance(option, str) else getattr(option, "name", "one's own")
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
        lines.append(f"  not placed yet: it is at the first call; devices: {where}")
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
