"""Find the tensors that have crossed, stay behind in the user's state, and are written there later.

A forward may keep the first micro-batch's activation, or a ``detach()`` of it, and add those of the
next ones in place. On the CPU that is the memory which another stage is still reading. The second
run of a recorded forward finds what the first one has left, and shows the write.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...._common.callsite import users_line
from ...._torch.modes import without_torch_functions
from ...entries import SharedChange
from ..saved_tensors import key_of

_REMEDY = "keep a copy (tensor.clone()), or add to it out of place (total = total + tensor)"


@dataclass
class _Crossed:
    storage: StorageWeakRef
    where: str  # the line that reads it
    hops: set[int] = field(default_factory=set)  # that read it
    written: dict[int, str] = field(default_factory=dict)  # the lines by hop


class CrossedMemory:
    """The memory of the tensors that have crossed in the first of two runs.

    Attributes:
        views: the positions of the forward's tensors, among its arguments, of which views crossed.
        overwrites: whether the second run has written to what the first one has returned.
        stay: what else may stay of the first run, of what its custom functions have made.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Crossed] = {}  # by the storage
        self._given: dict[int, tuple[int, Tensor]] = {}  # by the storage
        self._returned: dict[int, StorageWeakRef] = {}  # by itself
        self._filled: dict[int, StorageWeakRef] = {}
        self._is_second = self.overwrites = False
        self.views: set[int] = set()
        self.stay: list[weakref.ref[Tensor]] = []

    def begins(self, *, is_second: bool) -> None:
        """Note that a run begins."""
        self._is_second = is_second
        if not is_second:
            self.forget()

    def given(self, arguments: Iterable[Tensor]) -> None:
        """Note the tensors that the forward is given."""
        with without_torch_functions():
            self._given = {key_of(t) or 0: (at, t) for at, t in enumerate(arguments)}

    def imported(self, tensor: Tensor, hop: int) -> None:
        """Note that a tensor which the forward has made is read on another hop."""
        with without_torch_functions():
            key = None if self._is_second else key_of(tensor)
            if key in self._given:
                at, given = self._given[key]
                self.views |= {at} if tensor is not given else set()
            elif key is not None:
                new = _Crossed(StorageWeakRef(tensor.untyped_storage()), users_line())
                self._known.setdefault(key, new).hops.add(hop)

    def returned(self, tensor: Tensor) -> None:
        """Note that the forward returns a tensor that it has made."""
        self._note(tensor, self._returned)

    def filled(self, tensor: Tensor) -> None:
        """Note that the forward writes in place to a tensor that it has made."""
        self._note(tensor, self._filled)

    def _note(self, tensor: Tensor, storages: dict[int, StorageWeakRef]) -> None:
        with without_torch_functions():
            key = None if self._is_second else key_of(tensor)
            if key is not None:
                storages[key] = StorageWeakRef(tensor.untyped_storage())

    def stays(self) -> bool:
        """Return whether the first run, which is over, has left any of it; drop the rest."""
        self._known = {k: one for k, one in self._known.items() if _is_held(one.storage)}
        self._returned = {k: one for k, one in self._returned.items() if _is_held(one)}
        is_kept = any(made() is not None for made in self.stay)
        is_kept = is_kept or any(map(_is_held, self._filled.values()))
        return is_kept or bool(self._known or self._returned)

    def writing(self, written: Iterable[Tensor], hop: int) -> None:
        """Note what the second run is about to write to."""
        if not (self._is_second and (self._known or self._returned)):
            return
        with without_torch_functions():
            for tensor in written:
                key = key_of(tensor) or 0
                self.overwrites = self.overwrites or key in self._returned
                if (known := self._known.get(key)) is not None:
                    known.written.setdefault(max(hop, 0), users_line())

    def shared(self) -> Iterator[SharedChange]:
        """Yield what one hop has written, and another one of an earlier micro-batch may read."""
        for known in self._known.values():
            hops = known.hops | known.written.keys()
            if known.written and len(hops) > 1:
                what = f"a tensor that the one before has kept, which was read at {known.where}"
                where = next(iter(known.written.values()))
                yield SharedChange(what, "reads it", sorted(hops), where, _REMEDY)

    def forget(self) -> None:
        """Release the memory."""
        self._known.clear()
        self._given.clear()
        self._returned.clear()
        self._filled.clear()
        self.stay.clear()


def _is_held(storage: StorageWeakRef) -> bool:
    """Return whether a tensor still has a storage."""
    return not storage.expired()
