"""What each segment of a forward and backward takes, measured: one real micro-batch, several times.

The forward is stamped where a segment begins, in front of the module call that begins it. Autograd
runs the nodes of a graph in the reverse order in which they were made, so a segment's backward is
one unbroken stretch too, and begins with the node that was made last in it: that one gets a hook.
Hooks on every node, or a profiler, would take longer than small segments do; module hooks for the
backward (``register_full_backward_hook``) put nodes of their own into the graph, and see no glue.

On an accelerator stamps are events in its stream: a host clock would time the launches.
"""

from __future__ import annotations

import os
import statistics
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .._common.callsite import users_line
from .._common.modules import call_with_tensors, named_slots
from .._common.nested import map_tensors, tensors
from .._common.progress import Progress
from .._common.thread_state import CallerState, intra_operation_threads
from .._torch.graph import nodes_made, sequence_number
from .._torch.modules import COMPILED_CALL, buffers_of, parameters_of
from ..batches.losses import computed_loss, own_loss_or_none
from ..devices.rng_streams import every_source, preserve_rng, torchs_of
from ..devices.stopwatch import Stopwatch
from ..errors import UsageError
from ..recording.recording import Recording
from ..restoring.model_state import ModelState

R = TypeVar("R")
_Times = tuple[list[float], list[float]]  # of segments, forward and backward

WARM_UP = 2
_CHAIN = 64  # operations, by which a stamp is timed: some milliseconds


@dataclass(frozen=True)
class SegmentTimes:
    """What segments take, in seconds; medians.

    Attributes:
        forward: of each segment. Where segments cannot be cut apart, the first has the time of all.
        backward: of each segment.
        step: a whole forward and backward without stamps, alone; the segments add up to it, times
            ``crowded``.
        stamped: the segments' sum as measured with stamps. The cost of the stamps is subtracted
            from the segments in equal parts.
        device: where.
        threads: of the CPU.
        crowded: how many times as long a step takes while other threads, one for each further lane
            of the CPU, run it as well. The segments' times have it in them.
    """

    forward: list[float]
    backward: list[float]
    step: float
    stamped: float
    device: str
    threads: int
    crowded: float = 1.0


class _Stamped:
    """Stands in for a module's ``forward``: stamps those of its calls that begin a segment."""

    def __init__(self, forward: Callable[..., Any], segments: Mapping[int, int], run: _Run) -> None:
        self.forward, self.segments, self.run = forward, segments, run
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segment = self.segments.get(self.calls)
        self.calls += 1
        if segment is not None and self.run.is_forward:  # a recomputation calls it again
            self.run.begins(segment)
        return self.forward(*args, **kwargs)


class _Run:
    """One forward and backward: when each segment begins in both."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.is_forward = True
        self.segments: list[int] = []
        self.forward: list[Any] = []
        self.backward: dict[int, Any] = {}
        self.turned: Any = None  # the backward begins
        self._made: list[int] = []  # autograd's count of nodes where each segment begins

    def begins(self, segment: int) -> None:
        """A segment begins, in the forward."""
        self.segments.append(segment)
        self._made.append(nodes_made())
        self.forward.append(self.watch.now())

    def ends(self, roots: Sequence[Tensor]) -> None:
        """The forward is over; from now on the first node of each segment's backward is stamped."""
        self.is_forward = False
        self.forward.append(self.watch.now())
        newest: dict[int, tuple[int, Node]] = {}
        for node in _nodes(roots):
            made = sequence_number(node)
            at = self.segments[max(0, bisect_right(self._made, made) - 1)]
            if at not in newest or made > newest[at][0]:
                newest[at] = made, node
        for segment, (_, node) in newest.items():
            node.register_prehook(partial(self._begins_back, segment))
        self.turned = self.watch.now()

    def _begins_back(self, segment: int, _: object) -> None:
        self.backward[segment] = self.watch.now()

    def times(self, count: int, end: Any) -> tuple[list[float], list[float]]:
        """Seconds of each of so many segments, forward and backward."""
        forward, backward = [0.0] * count, [0.0] * count
        for segment, (begin, until) in zip(self.segments, pairwise(self.forward), strict=True):
            forward[segment] = self.watch.seconds(begin, until)
        # What comes before the first node (the roots' gradients) is the last segment's, where the
        # loss is. Pieces that autograd does not come to have no time.
        order = sorted(self.backward, reverse=True)
        begins = [self.turned, *(self.backward[segment] for segment in order[1:]), end]
        for segment, (begin, until) in zip(order, pairwise(begins), strict=False):
            backward[segment] = self.watch.seconds(begin, until)
        return forward, backward


def _nodes(roots: Sequence[Tensor]) -> Iterator[Node]:
    """What autograd will run, but for leaves: they go with whoever made their gradient."""
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if following.next_functions or not hasattr(following, "variable"):
                    waiting.append(following)


def measured(
    model: nn.Module,
    recording: Recording,
    cuts: Sequence[int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    device: torch.device,
    threads: int | None = None,
    lanes: int = 1,
    repeats: int = 5,
    training: bool = True,
) -> SegmentTimes:
    """Run a micro-batch on a device and time its segments.

    The model runs with copies of its buffers, and with its parameters' values (copies where they
    are on another device): its own, and their gradients, are not touched. Random states and
    attributes are put back.

    Args:
        model: has values.
        recording: of it, in one stage.
        cuts: segments that a stage can begin with: these are timed.
        args: of one micro-batch.
        kwargs: of one micro-batch.
        target: for ``loss_fn``.
        loss_fn: as for ``Pipeline.forward_backward``; ``None``: the model's own loss, and where it
            returns none, the sum of its outputs.
        device: where to run.
        threads: of the CPU; ``None``: as many as torch uses now.
        lanes: that are at work at once on the CPU: they share its memory and caches, and each takes
            longer than alone.
        repeats: how often, after a warm-up.
        training: with a backward.

    Raises:
        UsageError: nothing to go back from.
        Exception: the forward's own.
    """
    watch = Stopwatch(device)
    begins: dict[str, dict[int, int]] = {}
    for segment in cuts:
        calls = map(recording.calls.__getitem__, recording.segments[segment].calls)
        call = next(call for call in calls if call.is_module)
        begins.setdefault(call.path, {})[call.call] = segment
    modules = dict(model.named_modules())
    places = []
    for path, segments in begins.items():
        names = modules[path].__dict__
        compiled = names.get(COMPILED_CALL) is not None
        places.append((modules[path], COMPILED_CALL if compiled else "forward", segments))

    def step(run: _Run | None) -> tuple[Any, Any]:
        """Forward and backward; the stamps before and after."""
        inputs = map_tensors(lambda t: _copy(t, device), (args, dict(kwargs), target))
        watch.wait()
        begin = watch.now()
        if run is not None:
            run.begins(0)
        with torch.set_grad_enabled(training):
            output = model(*inputs[0], **inputs[1])
            roots = _roots(output, inputs[2], loss_fn)
        if run is not None:
            run.ends(roots)
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

    def plain() -> float:
        return watch.seconds(*step(None))

    def stamped() -> _Times:
        run = _Run(watch)
        before = [(m.__dict__, name, m.__dict__.get(name)) for m, name, _ in places]
        for module, name, segments in places:
            module.__dict__[name] = _Stamped(getattr(module, name), segments, run)
        try:
            _, end = step(run)
        finally:
            for names, name, value in before:
                names.pop(name) if value is None else names.update({name: value})
        return run.times(len(recording.segments), end)

    def measure() -> tuple[list[_Times], float, float, float]:
        """Each run's times, a plain run's, those of one among others, and a stamp's."""

        def pair() -> tuple[float, _Times]:
            progress.step(count=2)
            return plain(), stamped()

        with (
            intra_operation_threads(threads),
            Progress(f"measuring {recording.model}", 2 * (WARM_UP + repeats)) as progress,
        ):
            for _ in range(WARM_UP):
                pair()
            runs = [pair() for _ in range(repeats)]
            whole = statistics.median(run[0] for run in runs)
            stamp = _cost_of_a_stamp(watch, training=training)
            others = min(lanes, os.cpu_count() or 1) - 1
            together = _beside(plain, others, repeats) if others > 0 else whole
        return [run[1] for run in runs], whole, together, stamp

    runs, whole, together, stamp = _with_own_tensors(model, device, measure)
    forward, backward = (
        [statistics.median(times) for times in zip(*(run[kind] for run in runs), strict=True)]
        for kind in (0, 1)
    )
    with_stamps = sum(forward) + sum(backward)
    forward, backward = _corrected(forward, backward, whole, stamp)
    used = threads or torch.get_num_threads()
    crowded = max(1.0, together / whole)
    forward, backward = ([crowded * t for t in times] for times in (forward, backward))
    return SegmentTimes(forward, backward, whole, with_stamps, str(device), used, crowded)


def _beside(step: Callable[[], float], others: int, repeats: int) -> float:
    """Seconds of a step while others take it too; 0 where the model cannot run twice at once, as
    the pipeline never does: its lanes are on different modules."""
    with suppress(Exception), _in_a_crowd(step, others) as has_failed:
        seconds = statistics.median(step() for _ in range(repeats))
        return 0.0 if has_failed.is_set() else seconds
    return 0.0


@contextmanager
def _in_a_crowd(step: Callable[[], object], others: int) -> Iterator[threading.Event]:
    """While entered, other threads take steps, one after another; the event tells if one failed."""
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
    """Seconds, the least of several: of a chain of small operations, with stamps and without."""
    x = torch.ones(1, device=watch.device, requires_grad=training)

    def seconds(stamps: int) -> float:
        y, run = x, _Run(watch)
        watch.wait()
        with torch.set_grad_enabled(training):
            for index in range(_CHAIN):
                if index < stamps:
                    run.begins(index)
                y = y + 0
        run.ends([y] if training else [])
        if training:
            y.backward()
        end = watch.now()
        watch.wait()
        return sum(map(sum, run.times(_CHAIN, end)))

    with_one, with_all = (min(seconds(stamps) for _ in range(5)) for stamps in (1, _CHAIN))
    return max(0.0, with_all - with_one) / ((_CHAIN - 1) * (2 if training else 1))


def _corrected(
    forward: list[float], backward: list[float], whole: float, stamp: float
) -> tuple[list[float], list[float]]:
    """Without what the stamps cost, and adding up to a step without them.

    Pieces may add up to more for other reasons, such as one that was disturbed: from each no more
    than a stamp's own cost is taken.
    """
    beyond = sum(forward) + sum(backward) - whole
    stamps = sum(t > 0 for t in (*forward, *backward))
    each = min(stamp, max(0.0, beyond) / (stamps or 1))
    forward = [max(0.0, t - each) for t in forward]
    backward = [max(0.0, t - each) for t in backward]
    scale = whole / (sum(forward) + sum(backward) or whole or 1.0)
    return [t * scale for t in forward], [t * scale for t in backward]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """The forward may write to its inputs, and will run again."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _roots(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> list[Tensor]:
    """Where the backward begins: at the loss, as a step's; a model without one, at its outputs."""
    if loss_fn is not None:
        output = computed_loss(output, target, loss_fn)
    elif (loss := own_loss_or_none(output)) is not None:
        output = loss
    return [t for t in tensors(output) if t.requires_grad]


def _with_own_tensors(model: nn.Module, device: torch.device, function: Callable[[], R]) -> R:
    """Call a function while a model has parameters and buffers of its own, on a device."""
    made: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            if isinstance(tensor, nn.Parameter):
                values = tensor.detach().to(device, copy=True)  # a forward may write to it
                made[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad)
            else:
                made[id(tensor)] = _copy(tensor, device)
        return made[id(tensor)]

    slots = [*named_slots(model, parameters_of), *named_slots(model, buffers_of)]
    # A module may hold a parameter elsewhere too (a list of an RNN's): that one would get it.
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with ModelState(model, values=True), preserve_rng([*every_source(), *torchs_of(device)]):
            swapped = {name: own(tensor) for name, tensor in slots}
            return call_with_tensors(model, swapped, function)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
