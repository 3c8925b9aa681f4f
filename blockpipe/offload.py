"""Activations in host memory while their micro-batch is away.

What autograd saves on an offloaded stage is copied to pinned memory, on a stream of its own, and
its device memory is free again as soon as that is done. Before the backward (action R of the
schedule) it comes back on another stream, while the device is still busy with what was queued
before. ``torch.autograd.graph.save_on_cpu`` does both on the compute stream, and brings each tensor
back only when it is asked for.

Storages are copied, not tensors: what several nodes have saved of one storage goes once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .crossing import version_of
from .errors import StateError
from .transfer import copying, is_asynchronous
from .where import users_line

# Smaller ones stay: a copy of its own costs more than they take. A guess.
SMALLEST = 64 * 1024
on_cpu_too = False  # for tests: on the CPU there is nothing to gain


class Store:
    """One storage in host memory, and back on its device when it is needed.

    Args:
        storage: what to copy.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        self._original = weakref.ref(storage)
        self._back: Tensor | None = None
        self._arrived: torch.Event | None = None
        self._left: torch.Event | None = None
        source = _bytes_of(storage)
        if not is_asynchronous(self.device):
            self._host = source.clone()
            return
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        computing = torch.accelerator.current_stream(self.device)
        leaving = _streams.of(self.device, "out")
        leaving.wait_event(computing.record_event())
        with leaving:
            self._host.copy_(source, non_blocking=True)
            self._left = leaving.record_event()
        # It was allocated on the compute stream and is read on another.
        source.record_stream(leaving)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is this very storage's: keys are used again when a storage is gone."""
        return self._original() is storage

    def fetch(self) -> None:
        """Begin to bring it back; does not wait."""
        if self._back is not None:
            return
        if not is_asynchronous(self.device):
            self._back = self._host
            return
        coming = _streams.of(self.device, "in")
        assert self._left is not None
        coming.wait_event(self._left)
        with coming:
            self._back = self._host.to(self.device, non_blocking=True)
            self._arrived = coming.record_event()

    def tensor(self) -> Tensor:
        """Its bytes on the device, for the current stream to read."""
        self.fetch()
        assert self._back is not None
        if self._arrived is not None:
            computing = torch.accelerator.current_stream(self.device)
            computing.wait_event(self._arrived)
            self._back.record_stream(computing)  # allocated on the stream that it came on
            self._arrived = None
        return self._back


class _Streams:
    """For each device a stream out and one in: a link carries both ways at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}

    def of(self, device: torch.device, way: str) -> torch.Stream:
        with self._lock:
            stream = self._streams.get((device, way))
            if stream is None:
                stream = self._streams[device, way] = torch.Stream(device)
            return stream


_streams = _Streams()


class Away:
    """A saved tensor whose storage is in host memory."""

    __slots__ = ("_dtype", "_offset", "_shape", "_store", "_stride")

    def __init__(self, store: Store, tensor: Tensor) -> None:
        self._store = store
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), int(tensor.storage_offset())

    def tensor(self) -> Tensor:
        """As it was."""
        with copying(), torch.no_grad():
            bytes_ = self._store.tensor()
            made = torch.empty(0, dtype=self._dtype, device=bytes_.device)
            return made.set_(bytes_.untyped_storage(), self._offset, self._shape, self._stride)


@dataclass(slots=True)
class _Here:
    """A saved tensor that stays where it is; autograd's own check of its version is ours now."""

    tensor: Tensor
    version: int


class Offload:
    """What one micro-batch has saved on offloaded hops.

    Args:
        hop: says where the forward is.
        hops: those that are offloaded.
        stays: says of a storage whether it is a parameter's or a buffer's.
    """

    def __init__(
        self,
        hop: Callable[[], int],
        hops: frozenset[int],
        stays: Callable[[torch.UntypedStorage], bool],
    ) -> None:
        self._hop = hop
        self._hops = hops
        self._stays = stays
        self._stores: dict[int, dict[tuple[int, int], Store]] = {}

    def put_on(self) -> None:
        """Take what autograd saves in this thread from here on."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _unpack)

    def take_off(self) -> None:
        """The other way; these are the last hooks that were put on."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def away(self, tensor: Tensor) -> Away | None:
        """A tensor's stand-in, its storage on the way to the host; ``None``: it stays."""
        with torch._C.DisableTorchFunction():
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
            key = storage._cdata, version_of(tensor)
            store = stores.get(key)
            if store is None or not store.is_of(storage):
                with copying(), torch.no_grad():
                    store = stores[key] = Store(storage)
            return Away(store, tensor)

    def fetch(self, hop: int) -> None:
        """Begin to bring back what a hop has saved."""
        with copying(), torch.no_grad():
            for store in self._stores.get(hop, {}).values():
                store.fetch()

    def forget(self, hop: int) -> None:
        """A hop's backward is over."""
        self._stores.pop(hop, None)

    def _pack(self, tensor: Tensor) -> Any:
        away = self.away(tensor)
        if away is not None:
            return away
        with torch._C.DisableTorchFunction():
            # Not the tensor itself: a node that saves its own result would be a cycle.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return _Here(kept, version_of(kept))


def _unpack(packed: Away | _Here) -> Tensor:
    if isinstance(packed, Away):
        return packed.tensor()
    if version_of(packed.tensor) != packed.version:
        raise StateError(
            f"a tensor of shape {tuple(packed.tensor.shape)} that a gradient needs was written in "
            f"place after it was saved ({users_line()}); clone() it before writing"
        )
    return packed.tensor


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
