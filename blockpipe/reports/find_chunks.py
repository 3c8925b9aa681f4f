"""Benchmark candidate numbers of micro-batches, and report the fastest.

A formula knows the bubble, (p - 1) / (m + p - 1), but not the loss by smaller operations: on a
device that m = 64 keeps half empty, it recommends m = 64. So steps are timed. Candidates take
turns, round by round, so that a machine which slows down does so for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .._common.checks import expected, is_integer
from .._common.progress import Progress
from .._common.text import bytes_text, text_table
from ..batches.cut_off import cut_off
from ..batches.microbatch import Microbatch
from ..batches.step_arguments import StepArguments
from ..devices.devices import is_asynchronous, is_on_meta
from ..errors import RecordingError, ScheduleError, UsageError
from ..execution.step_runner import StepRunner
from ..preparation.memory.model import check_limit, copies_of
from ..preparation.options import check_schedule
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer
from ..restoring.preserved import PreservedModel
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from .predicted_step import predict_step, smallest_memory

_PER_STAGE = 8  # at most this many chunks for each stage, where the bubble is an eighth


@dataclass
class Trial:
    """One number of micro-batches under one schedule.

    Attributes:
        schedule: the schedule's name.
        chunks: the candidate.
        microbatches: the number of micro-batches that the batch makes of it.
        seconds: the median time of a step; ``None`` if it was not measured.
        samples_per_second: the throughput of a step.
        predicted_seconds: the time by the recording's work, the devices' rates and the schedule.
        bubble: the predicted share of the lanes' time in which they idle, 0 to 1.
        memory: the predicted bytes of the device that needs the most.
        why_not: the reason why it was not measured: over the limit, out of memory, an error.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> loss = torch.nn.functional.mse_loss
        >>> report = pipe.find_chunks(x, target=y, loss_fn=loss, candidates=[2], repeats=1)
        >>> trial = report.trials[0]
        >>> trial.schedule, trial.microbatches, trial.seconds > 0
        ('1f1b', 2, True)
    """

    schedule: str
    chunks: int
    microbatches: int
    seconds: float | None = None
    samples_per_second: float | None = None
    predicted_seconds: float | None = None
    bubble: float | None = None
    memory: int | None = None
    why_not: str | None = None


@dataclass(repr=False)
class ChunksReport:
    """The result of :meth:`Pipeline.find_chunks`; ``str()`` is a table.

    Attributes:
        trials: one entry for each candidate and schedule.
        samples: the number of samples in the batch.
        repeats: the number of steps of each trial.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> loss = torch.nn.functional.mse_loss
        >>> report = pipe.find_chunks(x, target=y, loss_fn=loss, candidates=[2, 4], repeats=1)
        >>> [trial.microbatches for trial in report.trials], report.best in report.trials
        ([2, 4], True)
    """

    trials: list[Trial]
    samples: int
    repeats: int

    @property
    def best(self) -> Trial | None:
        """The fastest trial; ``None`` if nothing could be measured."""
        measured = [trial for trial in self.trials if trial.seconds is not None]
        return min(measured, key=lambda trial: trial.seconds or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = ["Schedule", "Micro-batches", "ms", "Samples/s", "Predicted ms", "Bubble", "Memory"]
        best = self.best
        rows = [
            [
                trial.schedule,
                str(trial.microbatches),
                _shown(trial.seconds, "{:.2f}", 1e3) + ("*" if trial is best else " "),
                _shown(trial.samples_per_second, "{:.1f}"),
                _shown(trial.predicted_seconds, "{:.2f}", 1e3),
                _shown(trial.bubble, "{:.1f} %", 100),
                "-" if trial.memory is None else bytes_text(trial.memory),
            ]
            for trial in self.trials
        ]
        notes = ["no candidate could be measured"]
        if best is not None:
            notes = [
                f"* the fastest of {self.samples} samples a step, median of {self.repeats}: "
                f"schedule={best.schedule!r}, chunks={best.microbatches}"
            ]
        notes += [f"{t.schedule}, {t.microbatches}: {t.why_not}" for t in self.trials if t.why_not]
        notes.append("predicted are the time, the bubble and the memory of the fullest device")
        return text_table(head, rows, left=1) + "\n\n" + "\n".join(f"note: {n}" for n in notes)


def _shown(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(factor * value)


@dataclass(frozen=True)
class SearchOptions:
    """The candidates, and how often each is tried.

    Attributes:
        candidates: the numbers of micro-batches; ``None`` takes powers of two.
        schedules: the schedules to try them under; ``None`` takes the pipeline's.
        repeats: the number of steps of each trial.
        optimizer: the optimizer whose state counts for the memory.
        limit: the bytes of a device; ``None`` takes those that the accelerators have.
    """

    candidates: Iterable[int] | None
    schedules: Iterable[ScheduleOption] | ScheduleOption | None
    repeats: int
    optimizer: object
    limit: int | None


@dataclass
class _TrialRun:
    """A trial, the runner of its steps, and what was prepared for them."""

    trial: Trial
    runner: StepRunner | None = None  # None where it cannot run
    known: OrderedDict[Any, Prepared] = field(default_factory=OrderedDict)
    times: list[float] = field(default_factory=list)
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Note an error, such as a batch norm's of a single sample, or a schedule's for others."""
        self.error = error.with_traceback(None)
        cause = error.__cause__ or error
        self.trial.why_not = f"fails: {type(cause).__name__}: {cause}"


def find_chunks(runner: StepRunner, batch: StepArguments, options: SearchOptions) -> ChunksReport:
    """Try each candidate under each schedule.

    Args:
        runner: runs the pipeline's steps.
        batch: the arguments of a step.
        options: the candidates.
    """
    samples = sum(m.size for m in _split(runner, batch))
    schedules = _schedules(runner, options.schedules)
    wanted = _candidates(runner, options.candidates, samples)
    if not is_integer(options.repeats, 1):
        raise UsageError(expected("a positive integer", options.repeats, for_="repeats"))
    copies_of(options.optimizer)
    check_limit(options.limit)
    if is_on_meta(runner.preparer.model):  # it has values once it is placed
        runner.preparer.prepare(_split(runner, batch)[0], runner.options)
    tries = [
        _predicted(runner, batch, options, schedule, chunks)
        for schedule in schedules
        for chunks in wanted
    ]
    left = [one for one in tries if one.trial.why_not is None]
    if left:
        _measure(batch, left, options.repeats)
    errors = [one.error for one in tries if one.error is not None]
    if errors and len(errors) == len(tries):
        raise errors[0]  # the number of micro-batches is not the cause
    for one in left:
        if one.times and one.trial.why_not is None:
            one.trial.seconds = statistics.median(one.times)
            one.trial.samples_per_second = samples / one.trial.seconds
    return ChunksReport([one.trial for one in tries], samples, options.repeats)


def _split(runner: StepRunner, batch: StepArguments) -> list[Microbatch]:
    return runner.split(batch.args, batch.kwargs, batch.target)


def _candidates(
    runner: StepRunner, candidates: Iterable[int] | None, samples: int
) -> dict[int, int]:
    """Return the number of micro-batches of each candidate, each number once."""
    if candidates is None:
        recording = runner.preparer.recording
        given = runner.preparer.given_devices
        stages = len(given or ()) if recording is None else recording.num_stages
        most = _PER_STAGE * max(1, stages)
        candidates = sorted({runner.options.chunks, *(2**k for k in range(most.bit_length()))})
    wanted = list(candidates) if isinstance(candidates, Iterable) else [candidates]
    wrong = [n for n in wanted if not is_integer(n, 1)]
    if wrong or not wanted:
        raise UsageError(
            expected(
                "positive integers", wrong or wanted, for_="candidates", fix="pass [2, 4, 8], say"
            )
        )
    found: dict[int, int] = {}
    for chunks in wanted:
        if min(chunks, samples) not in found.values():
            found[chunks] = min(chunks, samples)
    return found


def _schedules(
    runner: StepRunner, schedules: Iterable[ScheduleOption] | ScheduleOption | None
) -> list[ScheduleOption]:
    if schedules is None:
        return [runner.options.schedule]
    one = isinstance(schedules, str | Schedule) or callable(schedules)
    found: list[ScheduleOption] = [schedules] if one else list(schedules)  # type: ignore[list-item, arg-type]
    for schedule in found:
        chunks = schedule.microbatches if isinstance(schedule, Schedule) else 1
        check_schedule(schedule, chunks)
    if not found:
        fix = "leave it out for the pipeline's"
        raise UsageError(expected("at least one schedule", found, for_="schedules", fix=fix))
    return found


def _predicted(
    runner: StepRunner,
    batch: StepArguments,
    options: SearchOptions,
    schedule: ScheduleOption,
    chunks: int,
) -> _TrialRun:
    """Return a candidate's trial with its prediction, and the reason if it is not tried."""
    name = schedule if isinstance(schedule, str) else getattr(schedule, "name", "a function")
    trial = Trial(str(name), chunks, chunks)
    one = _TrialRun(trial)
    try:
        runner = replace(runner, options=replace(runner.options, chunks=chunks, schedule=schedule))
        microbatches = _split(runner, batch)
        count = trial.microbatches = len(microbatches)
        prepared = runner.preparer.sketch(microbatches[0], runner.options)
        one.runner = runner
        if schedule == "uncut":
            return one  # one graph over all stages: no schedule to play out
        step = predict_step(prepared, schedule, count, optimizer=options.optimizer)
    except (ScheduleError, RecordingError) as error:
        one.fail(error)
        return one
    trial.predicted_seconds, trial.bubble = step.simulation.makespan, step.simulation.bubble
    trial.memory = max(step.memory.by_device.values())
    limit = smallest_memory(prepared.devices) if options.limit is None else options.limit
    if limit is not None and trial.memory > limit:
        trial.why_not = f"{bytes_text(trial.memory)} predicted, over {bytes_text(limit)}"
    return one


def _measure(batch: StepArguments, tries: list[_TrialRun], repeats: int) -> None:
    runner, loss = tries[0].runner, batch.loss_fn
    assert runner is not None
    preparer = runner.preparer
    modules = [preparer.model, *([loss] if isinstance(loss, torch.nn.Module) else [])]
    with preparer.apart():
        first = preparer.prepare(_split(runner, batch)[0], runner.options)
    if isinstance(loss, torch.nn.Module):
        loss.to(first.devices[first.route[-1]])
    given = [batch.args, batch.kwargs, batch.target]
    preserved = PreservedModel(modules, first.generators, given)
    total = (1 + repeats) * len(tries)
    with Progress("trying micro-batches", total, "steps") as progress:
        for turn in range(1 + repeats):
            for one in tries:
                progress.step(f"{one.trial.schedule}, {one.trial.microbatches}")
                if one.trial.why_not is None:
                    seconds = _timed(one, batch, preserved)
                    if turn and seconds is not None:  # the first one fills caches
                        one.times.append(seconds)


def _timed(one: _TrialRun, batch: StepArguments, preserved: PreservedModel) -> float | None:
    assert one.runner is not None
    preparer = one.runner.preparer
    # The caller's tensors, and the graph behind them, keep what they have.
    (args, kwargs, target), _ = cut_off((batch.args, batch.kwargs, batch.target))
    with preserved.run(), preparer.apart(one.known):
        try:
            _wait(preparer)
            began = time.perf_counter()
            one.runner.forward_backward(args, kwargs, target, batch.loss_fn)
            _wait(preparer)
            return time.perf_counter() - began
        except (torch.OutOfMemoryError, MemoryError):
            one.trial.why_not = "out of memory"
        except Exception as error:
            if "can't allocate memory" in str(error):  # the host's allocator raises a RuntimeError
                one.trial.why_not = "out of memory"
            else:
                one.fail(error)
    # Give the memory of the failed step to the next one.
    one.known.clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return None


def _wait(preparer: Preparer) -> None:
    for device in {d for d in preparer.placed() or () if is_asynchronous(d)}:
        torch.accelerator.synchronize(device)
