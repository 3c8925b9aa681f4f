"""Activations in host memory while their micro-batch is away.

What autograd saves on an offloaded stage is copied to pinned memory, on a stream of its own, while
the forward goes on. In the backward it comes back on another, each storage shortly before it is
read: so a stage has a few storages of one micro-batch on its device, and not all that the
micro-batch has saved. ``torch.autograd.graph.save_on_cpu`` does both on the compute stream, and
brings each tensor back only when it is asked for.

Storages are copied, not tensors: what several nodes have saved of one storage goes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._common.callsite import users_line
from .._common.threads.thread_state import ours
from .._torch.modes import without_torch_functions
from .._torch.tensors import storage_id, version_of
from ..devices.devices import is_asynchronous
from ..devices.ownership import copying
from ..errors import StateError
from .host_stores import HostLinks, Store
from .tags import TAG, Tag, latest

# Smaller ones stay: a copy of its own costs more than they take. A guess.
SMALLEST = 64 * 1024
on_cpu_too = False  # for tests: on the CPU there is nothing to gain


class OffloadedTensor:
    """A saved tensor whose storage is in host memory."""

    __slots__ = ("_dtype", "_offset", "_shape", "_store", "_stride")

    def __init__(self, store: Store, tensor: Tensor) -> None:
        self._store = store
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), int(tensor.storage_offset())

    def fetch(self) -> None:
        """Begin to bring the storage back, without waiting."""
        with _unseen():
            self._store.fetch()

    def tensor(self) -> Tensor:
        """Return the tensor as it was.

        Raises:
            StateError: it was written in place while it was copied.
        """
        if self._store.was_written:
            raise _written(self._shape)
        with _unseen():
            bytes_ = self._store.read()
            made = torch.empty(0, dtype=self._dtype, device=bytes_.device)
            return made.set_(bytes_.untyped_storage(), self._offset, self._shape, self._stride)


@dataclass(slots=True)
class _ResidentTensor:
    """A saved tensor that stays where it is. Autograd leaves the check of its version to us."""

    tensor: Tensor
    version: int


class Offload:
    """The tensors that one micro-batch has saved on offloaded hops.

    Args:
        hop: says where the forward is.
        hops: those that are offloaded.
        stays: says of a storage whether it is on its device anyway: a parameter's, a buffer's.
        links: the step's, to host memory.
    """

    def __init__(
        self,
        hop: Callable[[], int],
        hops: frozenset[int],
        stays: Callable[[torch.UntypedStorage], bool],
        links: HostLinks,
    ) -> None:
        self._hop = hop
        self._hops = hops
        self._stays = stays
        self._links = links
        self._stores: dict[int, dict[tuple[int, int], Store]] = {}
        self._last: dict[int, dict[torch.device, Store]] = {}

    def taking(self) -> saved_tensors_hooks:
        """Take what autograd saves in this thread, while entered."""
        return saved_tensors_hooks(self._pack, _unpack)

    def away(self, tensor: Tensor) -> OffloadedTensor | None:
        """Return a tensor's stand-in, whose storage is on its way to the host; ``None`` if the
        tensor stays."""
        with _unseen():
            hop = self._hop()
            kind = type(tensor)
            if hop not in self._hops or kind not in (Tensor, torch.nn.Parameter):
                return None
            if tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
                return None
            if not is_asynchronous(tensor.device) and not on_cpu_too:
                return None
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST or self._stays(storage):
                return None
            stores = self._stores.setdefault(hop, {})
            key = storage_id(storage), version_of(tensor)
            store = stores.get(key)
            if store is None or not store.is_of(storage):
                last = self._last.setdefault(hop, {})
                store = Store(tensor, self._links, before=last.get(tensor.device))
                stores[key] = last[tensor.device] = store
            store.readers += 1
            return OffloadedTensor(store, tensor)

    def fetch(self, hop: int) -> None:
        """Begin to bring back what a hop's backward reads first."""
        with _unseen():
            for store in self._last.get(hop, {}).values():
                store.fetch_last()

    def keep(self, hop: int) -> None:
        """Keep what a hop's backward reads for a second time, as each of its parts reads it."""
        for store in self._stores.get(hop, {}).values():
            store.keeps = True

    def forget(self, hop: int) -> None:
        """Release what a hop has saved: its backward is over."""
        self._last.pop(hop, None)
        self._stores.pop(hop, None)

    def _pack(self, tensor: Tensor) -> Any:
        # What was written on another hop is there, and torch.utils.checkpoint, which saves what it
        # was given past the glue, is to run again with that: what comes back has no tag.
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None:
            tensor, _ = latest(tensor, tag)
        away = self.away(tensor)
        if away is not None:
            return away
        with _unseen():
            # Not the tensor itself: a node that saves its own result would be a cycle.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return _ResidentTensor(kept, version_of(kept))


def _unpack(packed: OffloadedTensor | _ResidentTensor) -> Tensor:
    with ours():
        return _unpacked(packed)


def _unpacked(packed: OffloadedTensor | _ResidentTensor) -> Tensor:
    if isinstance(packed, OffloadedTensor):
        return packed.tensor()
    if version_of(packed.tensor) != packed.version:
        raise _written(packed.tensor.shape)
    return packed.tensor


def _written(shape: torch.Size) -> StateError:
    return StateError(
        f"a tensor of shape {tuple(shape)} that a gradient needs was written in place after it was "
        f"saved ({users_line()}); clone() it before writing"
    )


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide operations, while entered, from the user's modes, autograd and the sanitizer."""
    with without_torch_functions(), copying(), torch.no_grad():
        yield
