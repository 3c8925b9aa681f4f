"""Tensors that the code of hooks and losses reads and writes, by its source.

No function mode sees that code in a recording. In a step, lanes run their backwards at once, so
that a version that has changed does not tell which of them has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...._torch.tensors import shape_of
from ...entries import LateBackward, OutsideTensor, SharedChange, TensorInfo
from ..evaluation.expressions import Frame
from ..evaluation.members import UNKNOWN
from ..syntax.accesses import Access
from ..syntax.unknown_owners import asked_by_name
from ..values import SharedValue, back, hops_of, shared_change
from .used_tensors import CONTENT, GRADIENT, uses_of

_REMEDY = "read and write it in hooks of one stage, or between steps"
_ENGINE = "by autograd"


@dataclass
class ForwardsTensors:
    """What a recorded forward has done with tensors that outlive it.

    Attributes:
        held: the parameters and buffers by id.
        outside: the other tensors that it reads.
        stand_ins: by the id of each parameter and buffer, the fake one in its place.
        tensors: the parameters and buffers.
        is_written: says whether it writes to a parameter or a buffer.
    """

    held: Mapping[int, TensorInfo]
    outside: Iterable[OutsideTensor]
    stand_ins: Mapping[int, Tensor]
    tensors: Iterable[Tensor]
    is_written: Callable[[Tensor], bool]

    def __post_init__(self) -> None:
        self._others = {id(o.tensor()): o for o in self.outside if o.tensor is not None}

    def told(self, tensor: Tensor) -> tuple[str, TensorInfo | OutsideTensor | None, bool]:
        """Return a tensor's name, what is known of it, and whether the forward writes to it."""
        info = self.held.get(id(tensor))
        if info is not None:
            name = f"{'buffer' if info.is_buffer else 'parameter'} {info.name!r}"
            return name, info, info.written or self.is_written(tensor)
        other = self._others.get(id(tensor))
        return f"a tensor of shape {shape_of(tensor)}", other, other is not None and other.written

    def by_name(self, written: Iterable[tuple[Tensor, int]]) -> dict[str, set[int]]:
        """Return the hops that write to tensors, by their names, and of one that no module has
        registered by its first line, too."""
        found = defaultdict[str, set[int]](set)
        for tensor, hop in written:
            _, info, _ = self.told(tensor)
            if info is not None:
                is_held = isinstance(info, TensorInfo)
                found[info.name if is_held else f"{info.name} ({info.where}"].add(hop)
        return dict(found)

    def merged(self, uses: Iterable[SharedValue]) -> Iterable[SharedValue]:
        """Return the uses of each tensor and of its stand-in as one."""
        found: dict[tuple[int, str], SharedValue] = {}
        for known in uses:
            known.owner = self.stand_ins.get(id(known.owner), known.owner)
            other = found.setdefault((id(known.owner), known.key), known)
            other.set_on |= known.set_on
            other.read_on |= known.read_on
            other.first_write = other.first_write or known.first_write
            other.first_read = other.first_read or known.first_read
        return found.values()


class TensorUses:
    """The tensors that such code uses, with the hops and backwards that it runs in.

    Attributes:
        read_late: those that backwards read, with the hop and the line; arrays as tensors.
    """

    def __init__(self) -> None:
        self.read_late: list[tuple[Tensor, int, str]] = []
        self._known: dict[tuple[int, str], SharedValue] = {}
        self._by_name: dict[str, list[tuple[int, str]]] = {}  # of objects that nobody can tell

    def note(self, accesses: Iterable[Access], frame: Frame, given: object, hop: int) -> None:
        """Note what one instruction does.

        Args:
            accesses: its accesses.
            frame: the frame that it is in.
            given: the module or parameter that its hook is on.
            hop: the hop that it is on, or the number of that hop's backward.
        """
        accesses = [*accesses]
        for owner, name in filter(None, map(asked_by_name, accesses)):
            if frame.evaluated(owner) is UNKNOWN:
                self._by_name.setdefault(name, []).append((hop, frame.line))
        found = (use for access in accesses for use in uses_of(access, frame))
        for tensor, key, reads, writes in found:
            if tensor is given:  # to step by its own gradient is watched in steps
                continue
            known = self._known.setdefault((id(tensor), key), SharedValue(tensor, key))
            if writes:
                known.is_set(hop, frame.line)
                known.is_constant = False
            if reads:
                known.is_read(hop, frame.line)
                if hop < 0 and key == CONTENT:
                    self.read_late.append((tensor, back(hop), frame.line))

    def writes(self) -> Iterator[tuple[Tensor, int]]:
        """Yield those that are written, each with the hop, in the forward or the backward."""
        written = (known for known in self._known.values() if known.key == CONTENT)
        yield from ((known.owner, hop) for known in written for hop in hops_of(known.set_on))

    def read_by_loss(self, forward: ForwardsTensors) -> Iterator[str]:
        """Yield the buffers that the forward writes and the loss reads, in words."""
        self._note_by_name(forward)
        for known in forward.merged(self._known.values()):
            name, info, is_written = forward.told(known.owner)
            is_written = is_written and isinstance(info, TensorInfo)
            if is_written and known.key == CONTENT and max(known.read_on, default=-1) >= 0:
                yield f"{name} ({known.first_read})"

    def shared(
        self, forward: ForwardsTensors, untaken: Mapping[tuple[int, str], SharedValue]
    ) -> Iterator[SharedChange]:
        """Yield the tensors that one hop writes and another one, or its backward, reads.

        Args:
            forward: tells what the forward does with tensors.
            untaken: what branches do that it has not taken, by the tensor's id and what of it.
        """
        self._note_by_name(forward)
        for known in forward.merged(self._known.values()):
            name, info, is_written = forward.told(known.owner)
            if known.key == GRADIENT:
                yield from gradient_changes(known, info)
                continue
            hops, where = ([], "") if info is None else (info.hops, info.where)
            recorded = SharedValue(known.owner, known.key, where, where, read_on={*hops})
            recorded.set_on |= {*hops} if is_written else set()
            _note_forward(known, [recorded, untaken.get((id(known.owner), known.key), recorded)])
            if known.set_on and known.read_on and len(known.set_on | known.read_on) > 1:
                yield shared_change(known, name, known.read_on, known.first_read, _REMEDY)

    def written_late(
        self, forward: ForwardsTensors, untaken: Mapping[tuple[int, str], SharedValue]
    ) -> Iterator[LateBackward]:
        """Yield the tensors that a branch reads which was not taken, and its hop's backward writes:
        a step looks at backwards for those alone that forwards are known to read.

        Args:
            forward: as in :meth:`shared`.
            untaken: likewise.
        """
        for known in forward.merged(self._known.values()):
            used = untaken.get((id(known.owner), known.key))
            if used is None or known.key == GRADIENT:
                continue
            name, where = forward.told(known.owner)[0], used.first_read
            for hop in (hop for hop in used.read_on if back(hop) in known.set_on):
                what = f"the forward may read {name} on hop {hop} ({where})"
                needs = f"writes to it ({known.first_write})"
                yield LateBackward(what, needs, hop, [hop], _REMEDY)

    def _note_by_name(self, forward: ForwardsTensors) -> None:
        """Note the reads of buffers of which the code tells no more than the name."""
        for tensor in forward.tensors if self._by_name else ():
            _, info, is_written = forward.told(tensor)
            if is_written and isinstance(info, TensorInfo) and info.is_buffer:
                for name in {info.name, info.name.rpartition(".")[2]}:
                    for hop, line in self._by_name.get(name, ()):
                        known = SharedValue(tensor, CONTENT)
                        known = self._known.setdefault((id(tensor), CONTENT), known)
                        known.is_read(hop, line)


def gradient_changes(
    known: SharedValue, info: TensorInfo | OutsideTensor | None
) -> Iterator[SharedChange]:
    """Yield the change of a parameter's gradient for code that uses it: autograd adds to it in the
    backward of the first hop that reads the parameter."""
    if isinstance(info, TensorInfo) and info.hop is not None:
        known.is_set(back(info.hop), _ENGINE)
        known.is_read(back(info.hop), _ENGINE)
        if len(known.set_on | known.read_on) > 1:
            name = f"the .grad of {info.name!r}"
            yield shared_change(known, name, known.read_on, known.first_read, _REMEDY)


def _note_forward(known: SharedValue, of_forward: Iterable[SharedValue]) -> None:
    """Note what the forward does with a tensor. A write in a backward of a hop that reads it is
    looked at in steps, where it may come in the plain loop's order."""
    is_read_beside, set_beside = bool(known.read_on), set(known.set_on)
    for used in of_forward:
        for hop in used.read_on:
            if set_beside and not set_beside & {hop, back(hop)}:
                known.is_read(hop, used.first_read)
        for hop in used.set_on if is_read_beside else ():
            known.is_set(hop, used.first_write)
            known.is_constant &= used.is_constant
