"""Into how many micro-batches? Try, side by side, and report.

A formula knows the bubble, (p - 1) / (m + p - 1), but not what smaller operations lose: on a
device that m = 64 keeps half empty, it recommends m = 64. So steps are timed. Candidates take
turns, round by round, so that a machine which slows down does so for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .._common.callsite import users_line
from .._common.progress import Progress
from .._common.text import bytes_text, text_table
from ..batches.microbatch import Microbatch
from ..devices.devices import is_asynchronous, is_on_meta
from ..errors import RecordingError, ScheduleError, UsageError
from ..execution.step_runner import StepRunner
from ..preparation.memory_model import check_limit, copies_of, predict
from ..preparation.options import check_schedule
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer
from ..restoring.preserved import PreservedModel
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from ..schedules.simulation import simulate

_PER_STAGE = 8  # as many chunks for each stage, at the most: the bubble is an eighth then


@dataclass
class Trial:
    """One number of micro-batches under one schedule.

    Attributes:
        schedule: its name.
        chunks: as asked for.
        microbatches: as the batch makes them.
        seconds: of a step, the median; ``None``: not measured.
        samples_per_second: of a step.
        predicted_seconds: by the recording's work, the devices' rates and the schedule.
        bubble: predicted: the share of the lanes' time in which they idle, 0 to 1.
        memory: predicted: bytes, of the device that needs the most.
        why_not: why it was not measured: over the limit, out of memory, no such schedule.
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
    """What :meth:`Pipeline.find_chunks` found; ``str()`` is a table.

    Attributes:
        trials: one for each candidate and schedule.
        samples: in the batch.
        repeats: steps of each.
    """

    trials: list[Trial]
    samples: int
    repeats: int

    @property
    def best(self) -> Trial | None:
        """The fastest; ``None``: nothing could be measured."""
        measured = [trial for trial in self.trials if trial.seconds is not None]
        return min(measured, key=lambda trial: trial.seconds or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = ["Schedule", "Micro-batches", "ms", "Samples/s", "Predicted ms", "Bubble", "Memory"]
        best = self.best
        rows, notes = [], []
        for trial in self.trials:
            ms = "-" if trial.seconds is None else f"{1e3 * trial.seconds:.2f}"
            rows.append(
                [
                    trial.schedule,
                    str(trial.microbatches),
                    ms + ("*" if trial is best else " "),
                    _shown(trial.samples_per_second, "{:.1f}"),
                    _shown(trial.predicted_seconds, "{:.2f}", 1e3),
                    _shown(trial.bubble, "{:.1f} %", 100),
                    "-" if trial.memory is None else bytes_text(trial.memory),
                ]
            )
            if trial.why_not:
                notes.append(f"{trial.schedule}, {trial.microbatches}: {trial.why_not}")
        if best is None:
            notes.insert(0, "nothing was measured")
        else:
            notes.insert(
                0,
                f"* the fastest of {self.samples} samples a step, median of {self.repeats}: "
                f"schedule={best.schedule!r}, chunks={best.microbatches}",
            )
        notes.append("predicted: time, bubble and the memory of the fullest device")
        return text_table(head, rows, left=1) + "\n\n" + "\n".join(f"note: {n}" for n in notes)


def _shown(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(factor * value)


@dataclass
class StepArguments:
    """What a step is given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_fn: Callable[..., Any] | None


@dataclass
class SearchOptions:
    """What to try, and how often."""

    candidates: Iterable[int] | None
    schedules: Iterable[ScheduleOption] | ScheduleOption | None
    repeats: int
    optimizer: object
    limit: int | None


@dataclass
class _TrialRun:
    """A trial with what runs its steps, and what these were prepared by."""

    trial: Trial
    runner: StepRunner | None = None  # ``None``: it cannot run
    known: OrderedDict[Any, Prepared] = field(default_factory=OrderedDict)
    times: list[float] = field(default_factory=list)
    error: Exception | None = None

    def fails(self, error: Exception) -> None:
        """It cannot run so: batch norm of a single sample, a schedule for other micro-batches."""
        self.error = error.with_traceback(None)
        cause = error.__cause__ or error
        self.trial.why_not = f"fails: {type(cause).__name__}: {cause}"


def find_chunks(runner: StepRunner, batch: StepArguments, options: SearchOptions) -> ChunksReport:
    """Try each candidate under each schedule.

    Args:
        runner: of the pipeline's steps.
        batch: what a step is given.
        options: what to try.
    """
    samples = sum(m.size for m in _split(runner, batch))
    schedules = _schedules(runner, options.schedules)
    wanted = _candidates(runner, options.candidates, samples)
    repeats = options.repeats
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise UsageError(
            f"repeats is a whole number from 1 on, but {repeats!r} came ({users_line()})"
        )
    copies_of(options.optimizer)
    check_limit(options.limit)
    if is_on_meta(runner.preparer.model):  # its values come with the placement
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
        raise errors[0]  # it is not the number of micro-batches
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
    """From chunks to micro-batches, each number of these once."""
    if candidates is None:
        recording = runner.preparer.recording
        given = runner.preparer.given_devices
        stages = len(given or ()) if recording is None else recording.num_stages
        most = _PER_STAGE * max(1, stages)
        candidates = sorted({runner.options.chunks, *(2**k for k in range(most.bit_length()))})
    wanted = list(candidates) if isinstance(candidates, Iterable) else [candidates]
    wrong = [n for n in wanted if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if wrong or not wanted:
        raise UsageError(
            f"candidates are whole numbers from 1 on, such as [2, 4, 8], but {wrong or wanted} "
            f"came ({users_line()})"
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
        raise UsageError(f"schedules names none ({users_line()}); leave it out for the pipeline's")
    return found


def _predicted(
    runner: StepRunner,
    batch: StepArguments,
    options: SearchOptions,
    schedule: ScheduleOption,
    chunks: int,
) -> _TrialRun:
    """What the recording says of a candidate, and whether it is tried at all."""
    name = schedule if isinstance(schedule, str) else getattr(schedule, "name", "one's own")
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
        alone = prepared.runs_inline(schedule, count)
        option = "sequential" if alone else schedule
        played = simulate(prepared.schedule(option, count), prepared.costs)
        report = predict(prepared, option, count, optimizer=options.optimizer)
    except (ScheduleError, RecordingError) as error:
        one.fails(error)
        return one
    trial.predicted_seconds, trial.bubble = played.makespan, played.bubble
    trial.memory = max(report.by_device.values())
    limit = options.limit
    if limit is None and prepared.is_asynchronous:
        there = [device for device in prepared.devices if is_asynchronous(device)]
        limit = min(torch.accelerator.get_memory_info(d)[1] for d in there)
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
    preserved = PreservedModel(modules, first.generators)
    total = (1 + repeats) * len(tries)
    with Progress("trying micro-batches", total, "steps") as progress:
        for turn in range(1 + repeats):
            for one in tries:
                progress.step(f"{one.trial.schedule}, {one.trial.microbatches}")
                if one.trial.why_not is None:
                    seconds = _timed(one, batch, preserved)
                    if turn and seconds is not None:  # the first is for caches
                        one.times.append(seconds)


def _timed(one: _TrialRun, batch: StepArguments, preserved: PreservedModel) -> float | None:
    assert one.runner is not None
    preparer = one.runner.preparer
    with preserved.run(), preparer.apart(one.known):
        try:
            _wait(preparer)
            began = time.perf_counter()
            one.runner.forward_backward(batch.args, batch.kwargs, batch.target, batch.loss_fn)
            _wait(preparer)
            return time.perf_counter() - began
        except (torch.OutOfMemoryError, MemoryError):
            one.trial.why_not = "out of memory"
        except Exception as error:
            if "can't allocate memory" in str(error):  # the host's allocator has no class for it
                one.trial.why_not = "out of memory"
            else:
                one.fails(error)
    # What the failed step held is free now: the next one shall have it.
    one.known.clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return None


def _wait(preparer: Preparer) -> None:
    for device in {d for d in preparer.placed() or () if is_asynchronous(d)}:
        torch.accelerator.synchronize(device)
