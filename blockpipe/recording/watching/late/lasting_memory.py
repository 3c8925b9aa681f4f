"""The memory that outlives a recorded forward, whichever tensors show it.

A view, a ``.data`` or an array of numpy is another object than the buffer, but not other memory.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from ...._torch.modes import without_torch_functions
from ...._torch.tensors import address_of, extent_of, version_of
from ...entries import TensorInfo
from ..saved_tensors import key_of


class MemoryPart(NamedTuple):
    """A part of such memory: which one, its first byte, and the byte after its last."""

    key: int
    begin: int
    end: int

    def overlaps(self, other: MemoryPart) -> bool:
        """Return whether two places have a byte in common."""
        return self.key == other.key and self.begin < other.end and other.begin < self.end


class LastingMemory:
    """The memory of tensors that a forward has not made.

    Args:
        held: the parameters and buffers by id.
        tensors: their tensors.
    """

    def __init__(self, held: Mapping[int, TensorInfo], tensors: Iterable[Tensor]) -> None:
        self._held = held
        self._tensors: dict[int, dict[int, Tensor]] = {}  # by memory and id
        self._seen: dict[int, int] = {}  # by the memory of what operations see, the tensor's
        self._alive: list[object] = []  # so that no other memory gets their keys and addresses
        self._versions: dict[int, int] = {}  # by id
        self._addresses: list[tuple[int, int, int]] = []  # sorted: begin, end and key
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that the forward has not made."""
        key = key_of(tensor)
        if key is None or id(tensor) in self._tensors.get(key, ()):
            return
        if key not in self._tensors and (address := address_of(tensor)):
            if self._at_address(tensor, address) is not None:
                return  # memory that is known, as another library shows it
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            insort(self._addresses, (address, address + storage.nbytes(), key))
        self._tensors.setdefault(key, {})[id(tensor)] = tensor
        self._versions[id(tensor)] = version_of(tensor)
        seen = _as_seen(tensor)
        if (other := key_of(seen)) is not None and other != key:
            self._seen[other] = key
            self._alive.append(seen)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor itself was noted, and not only its memory."""
        return id(tensor) in self._versions

    def place_by_code(self, tensor: Tensor) -> MemoryPart | None:
        """Return the same as :meth:`place_of`, also for a view that code has found outside of a
        fake run, where the model's own tensors are fake ones."""
        return self.place_of(tensor) or self.place_of(_as_seen(tensor))

    def place_of(self, tensor: Tensor) -> MemoryPart | None:
        """Return where a tensor is in such memory; ``None``: it is elsewhere."""
        key = key_of(tensor)
        if key is None:
            return None
        key = self._seen.get(key, key)
        if key in self._tensors:
            return MemoryPart(key, *extent_of(tensor))
        return self._at_address(tensor, address_of(tensor))

    def _at_address(self, tensor: Tensor, address: int) -> MemoryPart | None:
        """Return the place of a tensor with a storage of its own, as that of an array of numpy."""
        at = bisect_right(self._addresses, address, key=itemgetter(0)) - 1
        if at < 0 or address >= self._addresses[at][1]:
            return None
        begins, _, key = self._addresses[at]
        begin, end = extent_of(tensor)
        return MemoryPart(key, address - begins + begin, address - begins + end)

    def uncounted(self, place: MemoryPart) -> list[Tensor]:
        """Return, after a write, those of its tensors whose versions have not counted it."""
        found = []
        for tensor in self._tensors[place.key].values():
            version = version_of(tensor)
            if version == self._versions[id(tensor)]:
                found.append(tensor)
            self._versions[id(tensor)] = version
        return found

    def behind(self, tensor: Tensor) -> list[Tensor]:
        """Return the noted tensors whose memory a tensor has, at least in part."""
        with without_torch_functions():
            if (place := self.place_of(tensor)) is None:
                return []
            found = [(one, self.place_of(one)) for one in self._tensors[place.key].values()]
        return [one for one, its in found if its is not None and place.overlaps(its)]

    def counts_for(self, place: MemoryPart, tensor: Tensor) -> bool:
        """Return whether a tensor has the version of the memory, and no counter of its own, as
        ``.data`` has."""
        return version_of(tensor) in map(version_of, self._tensors[place.key].values())

    def named(self, place: MemoryPart | None, leaf: Tensor | None) -> tuple[str, str | None]:
        """Return the words for what is at a place, or a leaf, and the name of it in the model."""
        found = [leaf] if place is None else [*self._tensors[place.key].values()]
        for tensor in found:
            held = self._held.get(id(tensor))
            if held is not None:
                return f"{'buffer' if held.is_buffer else 'parameter'} {held.name!r}", held.name
        shape = () if found[0] is None else tuple(found[0].shape)
        return f"a tensor of shape {shape} that no module registered", None

    def forget(self) -> None:
        """Release all tensors."""
        self._alive.clear()
        self._tensors.clear()


def _as_seen(tensor: Tensor) -> Tensor:
    """Return a tensor as operations see it: a fake one, in a fake run."""
    with without_torch_functions():
        return tensor.detach()
