"""Where a forward can be cut, and the costs of every stage between two cuts.

A cut is the index of the segment that a stage begins with. Everything that adds up over segments is
kept as a prefix sum, so that a number for *every* possible stage (a matrix over where it begins and
where it ends) is one subtraction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices.devices import is_asynchronous
from ..preparation.memory.model import working_bytes
from ..recording.calls import Call
from ..recording.entries import TensorInfo
from ..recording.recording import Recording


def why_closed(recording: Recording, at: Container[str] | None = None) -> list[str | None]:
    """Return for each segment the reason why no stage can begin with it; ``None`` if one can.

    Args:
        recording: a recording of the model without its marks, so that it is one stage.
        at: the paths of the modules that stages may begin with; ``None``: any.
    """
    found = [_why(recording, index, at) for index in range(len(recording.segments))]
    written = [held for held in recording.buffers if held.written]
    for name, segments in _readers(recording, written).items():
        for index in range(segments[0] + 1, segments[-1] + 1):
            why = f"buffer {name} is written, and its readers have to stay on one stage"
            found[index] = found[index] or why
    return found


def _why(recording: Recording, index: int, at: Container[str] | None) -> str | None:
    segment = recording.segments[index]
    if index == 0:
        return "the forward begins there"
    if segment.why_not is not None:
        return segment.why_not
    if segment.operations == 0:
        return "nothing runs there"
    calls = beginners(recording, index)
    if not calls:
        return "no module's call begins there, and a plan names modules"
    if at is not None and not any(call.path in at for call in calls):
        return "at= names none of the modules that begin there"
    return None


def beginners(recording: Recording, segment: int) -> list[Call]:
    """Return the module calls that begin a segment and compute something, the outermost first."""
    calls = (recording.calls[index] for index in recording.segments[segment].calls)
    return sorted((c for c in calls if c.is_module and c.hop is not None), key=lambda c: c.depth)


def _readers(recording: Recording, infos: Sequence[TensorInfo]) -> dict[str, list[int]]:
    """Return the segments that read each of these parameters or buffers, by its name."""
    wanted = {info.name for info in infos}
    found: dict[str, list[int]] = {}
    for segment in recording.segments:
        for name in segment.held:
            if name in wanted:
                found.setdefault(name, []).append(segment.index)
    return found


def cut_depth_penalty(recording: Recording, cuts: Sequence[int]) -> Tensor:
    """Return a penalty below 1 for each cut that is unlike one that people would write.

    Such a cut is deep inside of modules, or at a module that is called several times: a mark cannot
    tell the calls apart.
    """
    calls = Counter(call.path for call in recording.calls)
    found = []
    for cut in cuts:
        outermost = beginners(recording, cut)[0] if cut else recording.calls[0]
        found.append(min(0.9, (outermost.depth + 20 * (calls[outermost.path] > 1)) / 100))
    return torch.tensor(found, dtype=torch.double)


@dataclass
class SegmentCosts:
    """The costs of a recording's segments, and of every stage that they can make.

    The matrices have shape ``[segments + 1, segments + 1]`` and double precision: row ``i``, column
    ``j`` is the stage of segments ``i`` to ``j - 1``. Entries with ``j <= i`` are undefined.

    Attributes:
        recording: the recording of the model as one stage.
        forward: the seconds of one micro-batch's forward in each segment.
        backward: the seconds of its backward in each segment.
        devices: the stages' devices.
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
                row[first.get(name, 0)] += size  # a tensor without a reader is on the first stage
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
        """Return the bytes that a stage receives, and of these the bytes with a gradient to return.

        They are a micro-batch's tensors, and parameters and buffers that live on other stages.
        """
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
        """Return the bytes that autograd saves of a micro-batch in a stage.

        On one device a tensor that several stages save counts for the first of them. On the CPU a
        micro-batch's inputs are the caller's memory.
        """
        on_one_device, is_far = len(set(self.devices)) == 1, is_asynchronous(self.devices[0])
        return self._meeting(
            (-1, saved.segments[: 1 if on_one_device else None], saved.bytes)
            for saved in self.recording.saved
            if is_far or not saved.is_input
        )

    def _meeting(self, flows: Iterable[tuple[int, Sequence[int], float]]) -> Tensor:
        """Return for every stage the sum of the amounts that it has a part in.

        Args:
            flows: three values each: the segment after which a stage has to begin; the segments of
                which the stage has to contain one, ascending; the amount to add.
        """
        corners: list[tuple[int, int]] = []
        amounts: list[float] = []
        for after, segments, amount in flows:
            # For stages that begin after `before` and up to `at`, the first of these segments is
            # `at`; those that end behind it contain it. They are a rectangle of the matrix, written
            # as the differences at its corners.
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
        """Return the sum over a stage's segments, for every stage."""
        until = torch.cat([row.new_zeros(1), row.cumsum(0)])
        return until[None, :] - until[:, None]

    def most(self, row: Tensor) -> Tensor:
        """Return the maximum over a stage's segments, for every stage."""
        count = len(row)
        grid = row.new_zeros(count + 1, count + 1)
        grid[:count, 1:] = torch.triu(row.expand(count, count)).cummax(1).values
        return grid

    @property
    def seconds(self) -> Tensor:
        """The seconds of one micro-batch's forward and backward, for every stage."""
        return self.total(self.forward + self.backward)

    def memory(self, in_flight: int, copies: float, *, training: bool) -> Tensor:
        """Return the predicted peak in bytes, for every stage.

        :func:`blockpipe.preparation.memory.model.predict` adds up the same for one stage.

        Args:
            in_flight: the number of micro-batches whose activations the stage holds at once.
            copies: the copies of each trained parameter that the optimizer keeps.
            training: whether there is a backward.
        """
        fixed = self.total(self.parameters + self.buffers)
        largest = self.most(self.largest)
        if not training:
            nothing = torch.zeros_like(largest)
            return fixed + working_bytes(largest, nothing, torch.maximum) + self.received
        fixed = fixed + (1 + copies) * self.total(self.trained)
        working = working_bytes(largest, self.most(self.largest_trained), torch.maximum)
        if is_asynchronous(self.devices[0]) and len(set(self.devices)) > 1:
            working = working + self.received + self.returned
        return fixed + in_flight * self.saved + working


def _row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.double)
