"""Arguments and targets that share memory: ``model(ids, labels=ids)``, or the input as target.

A forward that writes to one in place changes the other. Copies of each on its stage would not, so
tensors that overlap are taken together: as views of one copy of the memory that they are in.
Pieces of one batch share a storage too, and mostly do not overlap: what counts is where in the
storage they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._common.nested import map_tensors, tensors
from .._torch.tensors import extent_of, is_ragged, memory_of, overlapping


class SharedMemory:
    """Tensors that overlap.

    Args:
        members: the tensors.
    """

    def __init__(self, members: list[Tensor]) -> None:
        self.members = members
        self._start = min(t.storage_offset() for t in members)

    @property
    def is_of_one_kind(self) -> bool:
        """Whether all are plain tensors of one dtype, so that views of one copy can be made."""
        kinds = {(type(t), t.dtype, t.is_conj(), t.is_neg()) for t in self.members}
        return kinds == {(Tensor, self.members[0].dtype, False, False)}

    @cached_property
    def span(self) -> Tensor:
        """The memory that they lie in, from the first element to the last."""
        first = self.members[0].detach()
        end = max(extent_of(t)[1] for t in self.members) // first.element_size()
        return first.as_strided((end - self._start,), (1,), self._start)

    def view(self, span: Tensor, member: Tensor) -> Tensor:
        """Return a member's part of a copy of the span, cut off from autograd; it shares its
        version with the other parts."""
        offset = span.storage_offset() + member.storage_offset() - self._start
        return span.as_strided(member.shape, member.stride(), offset).detach()


def shared_memories(given: Iterable[Tensor]) -> list[SharedMemory]:
    """Return the tensors that overlap with others, together.

    Args:
        given: the tensors; one that is there twice overlaps with itself.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in given:
        if tensor.layout is torch.strided and tensor.numel():
            by_storage.setdefault(memory_of(tensor), []).append(tensor)
    found = []
    for there in by_storage.values():
        if len(there) > 1:
            extents = ((*extent_of(tensor), tensor) for tensor in there)
            found += [SharedMemory(members) for members in overlapping(extents)]
    return found


def map_sharing(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a nested value with every tensor replaced by a copy; copies of tensors that overlap
    overlap in the same way.

    Args:
        function: makes the copy of one tensor.
        value: the nested value.
    """
    made: dict[int, Tensor] = {}
    given = {id(tensor): tensor for tensor in tensors(value)}
    found = shared_memories(given.values()) if len(given) > 1 else []
    for shared in found:  # kept to the end, with its span: what is known by id stays so
        if shared.is_of_one_kind:
            span = function(shared.span)
            for tensor in shared.members:
                copied = shared.view(span, tensor)
                made[id(tensor)] = copied.requires_grad_(tensor.requires_grad)

    def mapped(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return map_tensors(mapped, value)


def unified(value: Any) -> Any:
    """Return a nested value in which tensors without gradient that are the same memory are the same
    object: ``ids`` and ``ids.detach()``, or ``ids[:]``."""
    known: dict[Any, Tensor] = {}
    given = {id(tensor): tensor for tensor in tensors(value)}
    if len(given) < 2:
        return value
    same: dict[int, Tensor] = {}
    for tensor in given.values():
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or is_ragged(tensor):
            continue
        if not tensor.requires_grad:
            where = memory_of(tensor), tensor.storage_offset()
            kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
            first = known.setdefault((where, kind), tensor)
            if first is not tensor:
                same[id(tensor)] = first
    if not same:
        return value
    return map_tensors(lambda tensor: same.get(id(tensor), tensor), value)
