"""Collect what backwards will read of memory that outlives the forward.

Autograd notices a write to a tensor that it has saved by the tensor's version. It does not where
the saved tensor counts versions of its own (``.data``), where the user's hooks keep it, and where
a checkpoint's function or other code of the user's reads it in the backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...._common.callsite import users_line
from ...._common.nested import tensors
from ...._torch.graph import saved_tensor_hooks
from ...._torch.modes import without_torch_functions
from ....crossing.user_checkpoints import is_in_checkpoint
from ..saved_tensors import Packed
from .lasting_memory import LastingMemory, MemoryPart

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]
_RERUN = "_blockpipe_rerun"
_SAVED = "reads what autograd has saved of it"
_KEPT = "reads what hooks on saved tensors have kept of it"
_AGAIN = "runs the function of a checkpoint again, which reads it"
_IN_CODE = "reads it in code that autograd calls"


@dataclass
class LateRead:
    """A read of a backward.

    Attributes:
        place: what is read.
        leaf: the id of the leaf that is read, whatever its memory is later.
        hop: the hop of the backward.
        where: the line that leads to it.
        needs: the words for it.
        keepers: gone with the parts of the graph that read; ``None``: they are not known.
        is_norms: whether a normalization has saved it that updates it, whose backward does not read
            it.
        is_again: whether it comes from a checkpoint's function.
    """

    place: MemoryPart
    leaf: int | None
    hop: int
    where: str
    needs: str
    keepers: list[weakref.ref[Any]] | None = None
    is_norms: bool = False
    is_again: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether no backward will read."""
        return self.keepers is not None and not any(keeper() for keeper in self.keepers)

    @property
    def packed(self) -> Packed | None:
        """What autograd has saved, if it has done so itself."""
        packed = self.keepers[0]() if self.keepers else None
        return packed if isinstance(packed, Packed) else None

    @property
    def sample(self) -> tuple[torch.Size, torch.dtype] | None:
        """The shape and the dtype of what autograd has saved."""
        packed = self.packed
        return None if packed is None else (packed.tensor.shape, packed.tensor.dtype)


class _Kept:
    """What a hook of the user's keeps of a saved tensor; it goes with that part of the graph."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class _Rerun:
    """The reads of a checkpoint's function, which runs again until it has saved what it has saved
    before. It does not read then what it reads after that.

    Attributes:
        sure: the reads that come before a tensor is saved, by place and hop.
        unsure: the reads since then.
        kept: what the graph has of the checkpoint.
    """

    def __init__(self) -> None:
        self.sure: dict[tuple[MemoryPart, int], LateRead] = {}
        self.unsure: dict[tuple[MemoryPart, int], LateRead] = {}
        self.kept: list[weakref.ref[Any]] = []

    def saves(self, kept: Any) -> None:
        """Note that the function saves a tensor."""
        self.sure.update(self.unsure)
        self.unsure.clear()
        self.kept.append(weakref.ref(kept))


class LateReads:
    """Watch one forward for such reads.

    Args:
        memory: which outlives the forward.
        hop: returns the hop that the forward is on.
        function: returns the name of the torch function that is running.
        is_in_reentrant: says whether the function of a reentrant checkpoint is running.

    Attributes:
        packing: how many of the user's hooks are packing a tensor that autograd saves.
    """

    def __init__(
        self,
        memory: LastingMemory,
        hop: Callable[[], int],
        function: Callable[[], str],
        is_in_reentrant: Callable[[], bool],
    ) -> None:
        self._memory, self._hop, self._function = memory, hop, function
        self._is_in_reentrant = is_in_reentrant
        self._found: list[LateRead] = []
        self._saving: list[LateRead] = []  # for the operation that comes next
        self._reruns: list[_Rerun] = []
        self._reentrant = _Rerun()  # those of reentrant checkpoints
        self.packing = 0

    def saved(self, packed: Packed, hop: int) -> None:
        """Note that autograd saves a tensor on a hop."""
        self._keeps(packed.tensor, packed, hop, _SAVED)

    def watched(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Return the user's hooks on saved tensors, with a look at what they keep."""

        def packed(tensor: Tensor) -> _Kept:
            self.packing += 1
            try:
                kept = _Kept(pack(tensor))
            finally:
                self.packing -= 1
            with without_torch_functions():
                for part in tensors(kept.value):
                    self._keeps(part, kept, max(self._hop(), 0), _KEPT)
            return kept

        def unpacked(kept: _Kept) -> Tensor:
            return unpack(kept.value)

        return packed, unpacked

    def rerun(self, pack: _Pack) -> _Pack:
        """Return a checkpoint's hook on saved tensors, with a look at what is saved."""
        rerun = _Rerun()
        self._reruns.append(rerun)

        @functools.wraps(pack)
        def packed(tensor: Tensor) -> Any:
            with without_torch_functions():
                if not self._normalizes():
                    self._reads_again(tensor, rerun)
            kept = pack(tensor)
            rerun.saves(kept)
            return kept

        setattr(packed, _RERUN, rerun)
        return packed

    def reruns(self) -> bool:
        """Return whether a checkpoint will run again what runs now."""
        return is_in_checkpoint() or self._is_in_reentrant()

    def operands(self, operands: Iterable[Tensor]) -> None:
        """Note what an operation below autograd reads."""
        self._saving.clear()
        hooks = saved_tensor_hooks()
        rerun: _Rerun | None = getattr(hooks[0], _RERUN, None) if hooks is not None else None
        if rerun is None and self._is_in_reentrant():
            rerun = self._reentrant
        if rerun is not None:
            with without_torch_functions():
                for tensor in operands:
                    self._reads_again(tensor, rerun)

    def updates(self, place: MemoryPart | None) -> None:
        """Note that the operation which begins is a normalization that updates its statistics."""
        for read in self._saving:
            read.is_norms = read.is_norms or read.place == place

    def in_code(self, tensor: Tensor, hop: int, where: str) -> None:
        """Note that code which autograd calls in the backward of a hop reads a tensor."""
        place = self._memory.place_by_code(tensor)
        if place is not None:
            self._found.append(LateRead(place, None, hop, where, _IN_CODE))

    def may_read(self, statistic: Tensor) -> None:
        """Note that a normalization's backward may read a statistic, whatever its mode is now."""
        if (place := self._memory.place_by_code(statistic)) is not None:
            for read in self._found:
                read.is_norms = read.is_norms and not place.overlaps(read.place)

    def found(self) -> list[LateRead]:
        """Return the reads of backwards, as far as their graphs are there."""
        self._found = [read for read in self._found if not read.is_gone]
        again = [read for one in self._reruns for read in one.sure.values() if not read.is_gone]
        return [*self._found, *again, *self._reentrant.unsure.values()]

    def is_checked(self, read: LateRead) -> bool:
        """Return whether autograd compares the version of what it reads."""
        packed = read.packed
        return packed is not None and self._memory.counts_for(read.place, packed.tensor)

    def forget(self) -> None:
        """Release what was found, and end the cycles with those who are asked."""
        self._hop, self._function, self._is_in_reentrant = int, str, bool
        self._found.clear()
        self._reruns.clear()

    def _normalizes(self) -> bool:
        return "_norm" in self._function()

    def _keeps(self, tensor: Tensor, keeper: Any, hop: int, needs: str) -> None:
        place = self._memory.place_of(tensor)
        if place is not None:
            leaf = id(tensor) if tensor.is_leaf else None
            read = LateRead(place, leaf, hop, users_line(), needs, [weakref.ref(keeper)])
            self._found.append(read)
            self._saving.append(read)

    def _reads_again(self, tensor: Tensor, rerun: _Rerun) -> None:
        place, hop = self._memory.place_of(tensor), max(self._hop(), 0)
        if place is not None and (place, hop) not in rerun.sure:
            kept = None if rerun is self._reentrant else rerun.kept
            read = LateRead(place, id(tensor), hop, users_line(), _AGAIN, kept, is_again=True)
            rerun.unsure[place, hop] = read
