"""Where a forward can be cut, and what each choice of cuts comes to.

A cut is the index of the segment that a stage begins with. Everything that adds up over segments is
kept as a prefix sum, so that a number for *every* stage that could be (a matrix of where it begins
and where it ends) is one subtraction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices.devices import is_asynchronous
from ..recording.recording import Call, Recording, TensorInfo


def why_closed(recording: Recording) -> list[str | None]:
    """For each segment why no stage can begin with it; ``None``: one can.

    Args:
        recording: of the model without its marks, so that it is one stage.
    """
    found = [_why(recording, index) for index in range(len(recording.segments))]
    written = [held for held in recording.buffers if held.written]
    for name, segments in _readers(recording, written).items():
        for index in range(segments[0] + 1, segments[-1] + 1):
            why = (
                f"buffer {name} is written, and micro-batches would mix in it if it were torn apart"
            )
            found[index] = found[index] or why
    return found


def _why(recording: Recording, index: int) -> str | None:
    segment = recording.segments[index]
    if index == 0:
        return "the forward begins there"
    if segment.why_not is not None:
        return segment.why_not
    if segment.operations == 0:
        return "nothing runs there"
    if not beginners(recording, index):
        return "no module's call begins there, and a plan names modules"
    return None


def beginners(recording: Recording, segment: int) -> list[Call]:
    """The module calls that begin a segment and do something, the outermost first."""
    calls = (recording.calls[index] for index in recording.segments[segment].calls)
    return sorted((c for c in calls if c.is_module and c.hop is not None), key=lambda c: c.depth)


def _readers(recording: Recording, helds: Sequence[TensorInfo]) -> dict[str, list[int]]:
    """From each parameter's or buffer's name to the segments that read it."""
    wanted = {held.name for held in helds}
    found: dict[str, list[int]] = {}
    for segment in recording.segments:
        for name in segment.held:
            if name in wanted:
                found.setdefault(name, []).append(segment.index)
    return found


def cut_depth_penalty(recording: Recording, cuts: Sequence[int]) -> Tensor:
    """How far each cut is from what one would write, below 1: inside of many modules, or at a
    module that is called several times, which a mark cannot tell apart."""
    calls = Counter(call.path for call in recording.calls)
    found = []
    for cut in cuts:
        outermost = beginners(recording, cut)[0] if cut else recording.calls[0]
        found.append(min(0.9, (outermost.depth + 20 * (calls[outermost.path] > 1)) / 100))
    return torch.tensor(found, dtype=torch.double)


@dataclass
class SegmentCosts:
    """A recording's segments as numbers, to cost stages with.

    The matrices have shape ``[segments + 1, segments + 1]`` and double precision: row ``i``, column
    ``j`` is the stage of segments ``i`` to ``j - 1``. Entries with ``j <= i`` are undefined.

    Attributes:
        forward: seconds of each segment, of one micro-batch.
        backward: seconds of each segment.
        devices: of the stages.
    """

    recording: Recording
    forward: Tensor
    backward: Tensor
    devices: Sequence[torch.device]

    def __post_init__(self) -> None:
        recording = self.recording
        held = [*recording.parameters, *recording.buffers]
        first = {name: segments[0] for name, segments in _readers(recording, held).items()}

        def by_segment(sizes: Mapping[str, int]) -> Tensor:
            row = torch.zeros(len(recording.segments), dtype=torch.double)
            for name, size in sizes.items():
                row[first.get(name, 0)] += size  # what nobody reads is on the first stage
            return row

        self.parameters = by_segment({h.name: h.bytes for h in recording.parameters})
        self.elements = by_segment({h.name: h.elements for h in recording.parameters})
        self.buffers = by_segment({h.name: h.bytes for h in recording.buffers})
        self.trained = by_segment({h.name: h.bytes for h in recording.parameters if h.trainable})
        self.flops = _row([p.flops for p in recording.segments])
        self.saved = self._saved()
        self.largest = _row([p.largest_bytes for p in recording.segments])
        self.largest_trained = torch.zeros_like(self.largest)
        for h in recording.parameters:
            if h.trainable:
                at = first.get(h.name, 0)
                self.largest_trained[at] = max(float(self.largest_trained[at]), h.bytes)
        self.received, self.returned = self._crossings(first)

    def _crossings(self, first: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        """Bytes that a stage is given of a micro-batch's tensors and of others' parameters; and of
        these, what it gives back gradients for."""
        recording = self.recording
        flows = [(f.made, f.read, f.bytes, f.needs_grad) for f in recording.flows]
        readers = _readers(recording, [*recording.parameters, *recording.buffers])
        for held in (*recording.parameters, *recording.buffers):
            later = readers.get(held.name, [])[1:]
            if later:
                needs_grad = held.trainable and not held.is_buffer
                flows.append((first[held.name], later, held.bytes, needs_grad))
        given = self._meeting((made, read, size) for made, read, size, _ in flows)
        back = self._meeting((made, read, size) for made, read, size, needs in flows if needs)
        return given, back

    def _saved(self) -> Tensor:
        """Bytes that autograd saves in a stage, of a micro-batch. On one device all stages share
        what the first of them saves; on the CPU the inputs are the caller's."""
        on_one_device, is_far = len(set(self.devices)) == 1, is_asynchronous(self.devices[0])
        return self._meeting(
            (-1, saved.segments[: 1 if on_one_device else None], saved.bytes)
            for saved in self.recording.saved
            if is_far or not saved.is_input
        )

    def _meeting(self, flows: Iterable[tuple[int, Sequence[int], float]]) -> Tensor:
        """For every stage, the sum of what it has a part in.

        Args:
            flows: three values each: the segment after which a stage has to begin; the segments of
                which the stage has to contain one, ascending; the amount to add.
        """
        corners: list[tuple[int, int]] = []
        amounts: list[float] = []
        for after, segments, amount in flows:
            # A stage that begins after `before` and not after `at` first has to do with it at `at`,
            # if it ends later. A rectangle, as the differences at its corners.
            before = after
            for at in segments:
                corners += (before + 1, at + 1), (at + 1, at + 1)
                amounts += amount, -amount
                before = at
        size = len(self.recording.segments) + 2
        grid = torch.zeros(size, size, dtype=torch.double)
        rows, columns = torch.tensor(corners, dtype=torch.long).reshape(-1, 2).unbind(1)
        grid.index_put_((rows, columns), _row(amounts), accumulate=True)
        return grid.cumsum(0).cumsum(1)[:-1, :-1]

    def total(self, row: Tensor) -> Tensor:
        """The sum of a stage's segments, for every stage."""
        until = torch.cat([row.new_zeros(1), row.cumsum(0)])
        return until[None, :] - until[:, None]

    def most(self, row: Tensor) -> Tensor:
        """The largest of a stage's segments, for every stage."""
        count = len(row)
        grid = row.new_zeros(count + 1, count + 1)
        grid[:count, 1:] = torch.triu(row.expand(count, count)).cummax(1).values
        return grid

    @property
    def seconds(self) -> Tensor:
        """Forward and backward of one micro-batch, for every stage."""
        return self.total(self.forward + self.backward)

    def memory(self, in_flight: int, copies: float, *, training: bool) -> Tensor:
        """The peak in bytes, for every stage: as :mod:`blockpipe.preparation.memory_model` has it.

        Args:
            in_flight: micro-batches whose activations the stage holds at once.
            copies: of each trained parameter, that the optimizer keeps.
            training: whether there is a backward.
        """
        fixed = self.total(self.parameters + self.buffers)
        largest = self.most(self.largest)
        if not training:
            return fixed + 2 * largest + self.received
        fixed = fixed + (1 + copies) * self.total(self.trained)
        working = torch.maximum(2 * largest, largest + self.most(self.largest_trained))
        if is_asynchronous(self.devices[0]) and len(set(self.devices)) > 1:
            working = working + self.received + self.returned
        return fixed + in_flight * self.saved + working


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.double)


def best_bounds(
    costs: Sequence[Tensor], crossing: Tensor, *, slack: float = 0.0
) -> list[int] | None:
    """The cuts whose costliest stage costs the least; of these, those with the least crossing.

    By two dynamic programs: the first finds the least cost of the costliest stage, the second,
    among the stages that cost no more than that, the least sum of crossing. One program for both,
    with pairs of numbers, would not be exact: what is second best for a part may be the best for
    the whole.

    Args:
        costs: for each stage, a matrix of what it costs from where to where; infinite: it cannot
            be.
        crossing: of the same shape: what is added up over the stages to choose between equals.
        slack: by what share a stage may cost more for less crossing.

    Returns:
        ``stages + 1`` ascending indices, from the first to the last; ``None``: there are no such
        cuts.

    Example:
        >>> import torch
        >>> until = torch.tensor([0.0, 1.0, 2.0, 5.0])  # weights 1, 1, 3
        >>> cost = until[None, :] - until[:, None]
        >>> best_bounds([cost, cost], torch.zeros(4, 4))
        [0, 2, 3]
    """
    is_stage = torch.ones_like(crossing, dtype=torch.bool).triu(1)
    costs = [torch.where(is_stage, cost, torch.inf) for cost in costs]
    bounds = _search(costs, torch.maximum, -torch.inf)
    if bounds is None:
        return None
    worst = max(float(cost[bounds[s], bounds[s + 1]]) for s, cost in enumerate(costs))
    worst += abs(worst) * (slack + 1e-9)  # prefix sums are rounded
    allowed = [
        torch.where(cost.isfinite() & (cost <= worst), crossing, torch.inf) for cost in costs
    ]
    return _search(allowed, torch.add, 0.0)


def _search(
    costs: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor], begin: float
) -> list[int] | None:
    size = len(costs[0])
    best = torch.full((size,), torch.inf, dtype=torch.double)
    best[0] = begin
    came_from = []
    for cost in costs:
        best, source = combine(best[:, None].expand_as(cost), cost).min(0)
        came_from.append(source)
    if best[-1] == torch.inf:
        return None
    bounds = [size - 1]
    for source in reversed(came_from):
        bounds.append(int(source[bounds[-1]]))
    return bounds[::-1]
