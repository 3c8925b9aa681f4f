"""Tensors that the code of hooks and losses reads and writes, by its source.

No function mode sees that code in a recording. In a step, lanes run their backwards at once, so
that a version that has changed does not tell which of them has written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..entries import OutsideTensor, SharedChange, TensorInfo
from .evaluation.expressions import Frame
from .places import is_array
from .syntax.accesses import Access
from .syntax.uses import Use
from .values import SharedValue, back, shared_change

_CONTENT, _GRADIENT = "content", "grad"
_REMEDY = "read and write it in hooks of one stage, or between steps"
_ENGINE = "by autograd"


class TensorUses:
    """The tensors that such code uses, with the hops and backwards that it runs in.

    Attributes:
        read_late: those that backwards read, with the hop and the line; arrays as tensors.
    """

    def __init__(self) -> None:
        self.read_late: list[tuple[Tensor, int, str]] = []
        self._known: dict[tuple[int, str], SharedValue] = {}

    def note(self, accesses: Iterable[Access], frame: Frame, given: object, hop: int) -> None:
        """Note what one instruction does.

        Args:
            accesses: its accesses.
            frame: the frame that it is in.
            given: the module or parameter that its hook is on.
            hop: the hop that it is on, or the number of that hop's backward.
        """
        for access in accesses:
            tensor, key = _used(access, frame)
            if tensor is None or tensor is given:  # to step by its own gradient is watched in steps
                continue
            known = self._known.setdefault((id(tensor), key), SharedValue(tensor, key))
            is_changed = access.writes or access.use in (Use.WRITE, Use.BOTH)
            if is_changed:
                known.is_set(hop, frame.line)
                known.is_constant = False
            if access.counts or (access.use in (Use.READ, Use.BOTH) and access.reads):
                known.is_read(hop, frame.line)
                if hop < 0 and key == _CONTENT:
                    self.read_late.append((tensor, back(hop), frame.line))

    def shared(
        self,
        held: Mapping[int, TensorInfo],
        outside: Iterable[OutsideTensor],
        stand_ins: Mapping[int, Tensor],
        is_written: Callable[[Tensor], bool],
    ) -> Iterator[SharedChange]:
        """Yield the tensors that one hop writes and another one, or its backward, reads.

        Args:
            held: the parameters and buffers by id.
            outside: the other tensors that the forward reads.
            stand_ins: by the id of each parameter and buffer, the fake one in its place.
            is_written: says whether the forward writes to a parameter or a buffer.
        """
        others = {id(o.tensor()): o for o in outside if o.tensor is not None}
        for known in _merged(self._known.values(), stand_ins):
            tensor = known.owner
            info = held.get(id(tensor))
            if known.key == _GRADIENT:
                if info is None or info.hop is None:
                    continue
                name = f"the .grad of {info.name!r}"
                known.is_set(back(info.hop), _ENGINE)
                known.is_read(back(info.hop), _ENGINE)
            elif info is not None:
                name = f"{'buffer' if info.is_buffer else 'parameter'} {info.name!r}"
                _note_forward(known, info, is_written=info.written or is_written(tensor))
            else:
                other = others.get(id(tensor))
                name = f"a tensor of shape {tuple(tensor.shape)}"
                if other is not None:
                    _note_forward(known, other, is_written=other.written)
            if known.set_on and known.read_on and len(known.set_on | known.read_on) > 1:
                yield shared_change(known, name, known.read_on, known.first_read, _REMEDY)


def _merged(uses: Iterable[SharedValue], stand_ins: Mapping[int, Tensor]) -> Iterable[SharedValue]:
    """Return the uses of each tensor and of its stand-in as one."""
    found: dict[tuple[int, str], SharedValue] = {}
    for known in uses:
        known.owner = stand_ins.get(id(known.owner), known.owner)
        other = found.setdefault((id(known.owner), known.key), known)
        other.set_on |= known.set_on
        other.read_on |= known.read_on
        other.first_write = other.first_write or known.first_write
        other.first_read = other.first_read or known.first_read
    return found.values()


def _note_forward(
    known: SharedValue, info: TensorInfo | OutsideTensor, *, is_written: bool
) -> None:
    """Note what the forward does with a tensor. A write in a backward of a hop that reads it is
    looked at in steps, where it may come in the plain loop's order."""
    is_read_beside, set_beside = bool(known.read_on), set(known.set_on)
    for hop in info.hops:
        if set_beside and not set_beside & {hop, back(hop)}:
            known.is_read(hop, info.where)
        if is_written and is_read_beside:
            known.is_set(hop, info.where)


def _used(access: Access, frame: Frame) -> tuple[Tensor | None, str]:
    """Return the tensor that an access is to, and what of it."""
    node = access.node
    base = frame.evaluated(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else None
    if isinstance(base, Tensor):
        if isinstance(node, ast.Attribute) and node.attr == _GRADIENT:
            return base, _GRADIENT
        is_content = not isinstance(node, ast.Attribute) or node.attr == "data"
        return (base, _CONTENT) if is_content else (None, "")
    found = frame.evaluated(node)
    is_assigned = access.writes and not access.counts  # the name gets another tensor
    if is_array(found) and found.flags.writeable:
        found = torch.from_numpy(found)
    return (found if isinstance(found, Tensor) and not is_assigned else None), _CONTENT
