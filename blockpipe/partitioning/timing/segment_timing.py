"""Measure the time of each segment of a forward and backward: run a micro-batch several times.

Runs with stamps (:mod:`blockpipe.partitioning.timing.segment_stamps`) alternate with runs without;
the difference is the stamps' cost, which is subtracted.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.modules import call_with_tensors, named_slots
from ..._common.nested import map_tensors, tensors
from ..._common.progress import Progress
from ..._common.threads.shared_contexts import SharedContexts
from ..._common.threads.thread_state import CallerState, intra_operation_threads
from ..._torch.modules import COMPILED_CALL, buffers_of, parameters_of
from ...batches.losses import computed_loss, own_loss_or_none
from ...batches.step_arguments import StepArguments
from ...devices.rng_streams import every_source, preserve_rng, torchs_of
from ...devices.stopwatch import Stopwatch
from ...errors import UsageError
from ...recording.recording import Recording
from ...restoring.model_state import ModelState
from ...restoring.preserved import fresh_copy
from .segment_stamps import SegmentStamps, StampedForward

WARM_UP = 2
_CHAIN = 64  # operations that a stamp is timed by: some milliseconds

R = TypeVar("R")
_Times = tuple[list[float], list[float]]  # of each segment, forward and backward


@dataclass(frozen=True)
class SegmentTimes:
    """The seconds that segments take, as medians.

    Attributes:
        forward: the time of each segment. Where segments cannot be cut apart, the first has the
            time of all.
        backward: the time of each segment's backward.
        step: a whole forward and backward without stamps, alone. The segments add up to it, times
            ``crowded``.
        stamped: the segments' sum as measured with stamps. The cost of the stamps is subtracted
            from the segments in equal parts.
        device: the device that it ran on.
        threads: the CPU threads that it ran with.
        crowded: the factor by which a step takes longer while other threads, one for each further
            lane of the CPU, run it as well. The segments' times include it.
    """

    forward: list[float]
    backward: list[float]
    step: float
    stamped: float
    device: str
    threads: int
    crowded: float = 1.0


@dataclass(frozen=True)
class TimingOptions:
    """How segments are timed.

    Attributes:
        device: the device to run on.
        threads: the CPU threads to run with; ``None`` takes as many as torch uses now.
        lanes: the number of lanes that are at work at once on the CPU. They share its memory and
            caches, and each takes longer than alone.
        repeats: the number of runs, after a warm-up.
        training: whether there is a backward.
    """

    device: torch.device
    threads: int | None = None
    lanes: int = 1
    repeats: int = 5
    training: bool = True


class SegmentTimer:
    """Times the segments of one micro-batch's forward and backward.

    The model runs with copies of its parameters and buffers: its own, and their gradients, are not
    touched. Random states and attributes are put back.

    Args:
        model: the model, with values.
        recording: its recording in one stage.
        cuts: the segments that a stage can begin with: these are timed.
        sample: the arguments of one micro-batch. Without a loss function, the model's own loss
            counts, and where it returns none, the sum of its outputs.
        options: how to time.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        cuts: Sequence[int],
        sample: StepArguments,
        options: TimingOptions,
    ) -> None:
        self.model, self.recording, self.sample, self.options = model, recording, sample, options
        self._watch = Stopwatch(options.device)
        begins: dict[str, dict[int, int]] = {}  # the segment, by path and number of the call
        for segment in cuts:
            calls = map(recording.calls.__getitem__, recording.segments[segment].calls)
            call = next(call for call in calls if call.is_module)
            begins.setdefault(call.path, {})[call.call] = segment
        modules = dict(model.named_modules())
        self._places = []  # module, name of what is called in it, segments by call
        for path, segments in begins.items():
            module = modules[path]
            is_compiled = module.__dict__.get(COMPILED_CALL) is not None
            name = COMPILED_CALL if is_compiled else "forward"
            self._places.append((module, name, segments))

    def measure(self) -> SegmentTimes:
        """Run the micro-batch, and return the times of its segments.

        Raises:
            UsageError: the output has no gradient to begin a backward at.
            Exception: the forward's own.
        """
        options = self.options
        runs, whole, stamp, crowded = _with_own_tensors(self.model, options.device, self._run)
        forward, backward = (
            [statistics.median(times) for times in zip(*rows, strict=True)]
            for rows in zip(*(stamped for _, stamped in runs), strict=True)
        )
        with_stamps = sum(forward) + sum(backward)
        forward, backward = _corrected(forward, backward, whole, stamp)
        return SegmentTimes(
            [crowded * seconds for seconds in forward],
            [crowded * seconds for seconds in backward],
            whole,
            with_stamps,
            str(options.device),
            options.threads or torch.get_num_threads(),
            crowded,
        )

    def _run(self) -> tuple[list[tuple[float, _Times]], float, float, float]:
        """Return each run's seconds without stamps and its times with them; the median of the
        first, the cost of a stamp, and the factor of :meth:`_slowdown_in_a_crowd`."""
        options = self.options
        runs: list[tuple[float, _Times]] = []
        steps = 2 * (WARM_UP + options.repeats)
        with (
            intra_operation_threads(options.threads),
            Progress(f"measuring {self.recording.model}", steps) as progress,
        ):
            for _ in range(WARM_UP + options.repeats):
                progress.step(count=2)
                runs.append((self._plain_step(), self._stamped_step()))
            del runs[:WARM_UP]
            whole = statistics.median(plain for plain, _ in runs)
            stamp = _cost_of_a_stamp(self._watch, training=options.training)
            return runs, whole, stamp, self._slowdown_in_a_crowd(whole)

    def _slowdown_in_a_crowd(self, whole: float) -> float:
        """Return the factor by which a step takes longer while the other lanes are at work."""
        options = self.options
        others = min(options.lanes, os.cpu_count() or 1) - 1
        if others < 1:
            return 1.0
        return max(1.0, _seconds_in_a_crowd(self._plain_step, others, options.repeats) / whole)

    def _step(self, stamps: SegmentStamps | None) -> tuple[Any, Any]:
        """Run a forward and backward, and return the stamps before and after."""
        sample, training, watch = self.sample, self.options.training, self._watch
        args, kwargs, target = map_tensors(
            lambda tensor: fresh_copy(tensor, self.options.device),
            (sample.args, dict(sample.kwargs), sample.target),
        )
        watch.wait()
        begin = watch.now()
        if stamps is not None:
            stamps.begin_segment(0)
        with torch.set_grad_enabled(training):
            roots = _roots(self.model(*args, **kwargs), target, sample.loss_fn)
        if stamps is not None:
            stamps.end_forward(roots)
        if training:
            if not roots:
                raise UsageError(
                    "a backward needs a loss or an output with a gradient path, but there is none "
                    f"({users_line()}); pass training=False for a forward alone"
                )
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        end = watch.now()
        watch.wait()
        return begin, end

    def _plain_step(self) -> float:
        return self._watch.seconds(*self._step(None))

    def _stamped_step(self) -> tuple[list[float], list[float]]:
        stamps = SegmentStamps(self._watch)
        before = [(m.__dict__, name, m.__dict__.get(name)) for m, name, _ in self._places]
        for module, name, segments in self._places:
            module.__dict__[name] = StampedForward(getattr(module, name), segments, stamps)
        try:
            _, end = self._step(stamps)
        finally:
            for names, name, value in before:
                names.pop(name) if value is None else names.update({name: value})
        return stamps.times(len(self.recording.segments), end)


def _seconds_in_a_crowd(step: Callable[[], float], others: int, repeats: int) -> float:
    """Return the seconds of a step while other threads run the same step concurrently.

    The result is 0 if the model cannot run concurrently with itself. A pipeline never does that:
    its lanes are on different modules.
    """
    with suppress(Exception), SharedContexts(), _in_a_crowd(step, others) as has_failed:
        seconds = statistics.median(step() for _ in range(repeats))
        return 0.0 if has_failed.is_set() else seconds
    return 0.0


@contextmanager
def _in_a_crowd(step: Callable[[], object], others: int) -> Iterator[threading.Event]:
    """While entered, have other threads take one step after another.

    Yields:
        An event that is set if one of them failed.
    """
    ambient, threads = CallerState(), torch.get_num_threads()
    is_enough, has_failed = threading.Event(), threading.Event()
    under_way = threading.Barrier(others + 1)

    def keep_on() -> None:
        torch.set_num_threads(threads)
        under_way.wait()
        while not is_enough.is_set() and not has_failed.is_set():
            try:
                ambient.run(step)
            except Exception:
                has_failed.set()

    ambient.for_threads()
    crowd = [threading.Thread(target=keep_on, daemon=True) for _ in range(others)]
    for thread in crowd:
        thread.start()
    under_way.wait()
    try:
        yield has_failed
    finally:
        is_enough.set()
        for thread in crowd:
            thread.join()


def _cost_of_a_stamp(watch: Stopwatch, *, training: bool) -> float:
    """Return the seconds of a stamp: of a chain of small operations with stamps and without.

    Each is run several times, and the least counts.
    """
    x = torch.ones(1, device=watch.device, requires_grad=training)

    def seconds(count: int) -> float:
        y, stamps = x, SegmentStamps(watch)
        watch.wait()
        with torch.set_grad_enabled(training):
            for index in range(_CHAIN):
                if index < count:
                    stamps.begin_segment(index)
                y = y + 0
        stamps.end_forward([y] if training else [])
        if training:
            y.backward()
        end = watch.now()
        watch.wait()
        return sum(map(sum, stamps.times(_CHAIN, end)))

    with_one, with_all = (min(seconds(count) for _ in range(5)) for count in (1, _CHAIN))
    return max(0.0, with_all - with_one) / ((_CHAIN - 1) * (2 if training else 1))


def _corrected(
    forward: list[float], backward: list[float], whole: float, stamp: float
) -> tuple[list[float], list[float]]:
    """Return times without the stamps' cost, which add up to a step without stamps.

    Segments may add up to more than the step for other reasons too, such as one that was
    disturbed; so no more than a stamp's own cost is subtracted from each.

    Args:
        forward: the time of each segment with stamps.
        backward: the time of each segment's backward with stamps.
        whole: the time of a step without stamps.
        stamp: the cost of a stamp.
    """
    beyond = sum(forward) + sum(backward) - whole
    stamps = sum(t > 0 for t in (*forward, *backward))
    each = min(stamp, max(0.0, beyond) / (stamps or 1))
    forward = [max(0.0, t - each) for t in forward]
    backward = [max(0.0, t - each) for t in backward]
    scale = whole / (sum(forward) + sum(backward) or whole or 1.0)
    return [t * scale for t in forward], [t * scale for t in backward]


def _roots(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> list[Tensor]:
    """Return the tensors that the backward begins at: a step's loss, or the model's outputs."""
    if loss_fn is not None:
        output = computed_loss(output, target, loss_fn)
    elif (loss := own_loss_or_none(output)) is not None:
        output = loss
    return [t for t in tensors(output) if t.requires_grad]


def _with_own_tensors(model: nn.Module, device: torch.device, function: Callable[[], R]) -> R:
    """Call a function while a model has parameters and buffers of its own on a device."""
    made: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            if isinstance(tensor, nn.Parameter):
                values = tensor.detach().to(device, copy=True)  # a forward may write to it
                made[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad)
            else:
                made[id(tensor)] = fresh_copy(tensor, device)
        return made[id(tensor)]

    slots = [*named_slots(model, parameters_of), *named_slots(model, buffers_of)]
    # A module may hold a parameter elsewhere too (an RNN's list), which would get the gradient.
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    state = ModelState(model, values=True)
    try:
        # Twice: what the function has made goes in the first, and finalizers run (``__del__``).
        with state, state, preserve_rng([*every_source(), *torchs_of(device)]):
            swapped = {name: own(tensor) for name, tensor in slots}
            return call_with_tensors(model, swapped, function)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
