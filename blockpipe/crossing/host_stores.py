"""A storage's way to pinned host memory and back, in the order of its device's compute stream.

The host queues a whole step long before the device runs it, and memory is handed out when the host
asks for it. A block that is let go under ``record_stream`` comes back only when the device has got
there: for the rest of the step, never. So no block is let go here before its compute stream waits
for the copy. From then on that stream's own order protects it, and it can be used again at once,
however far the host is ahead. For the same reason what comes back is allocated on the compute
stream, and copied once that stream has come to where it was allocated.

What the copies hold besides is bounded by their number (:data:`AHEAD`): when one more leaves, the
compute stream waits for the first of them; when a storage is read, the next ones set out.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque

import torch
from torch import Tensor

from .._common.threads.thread_state import ours
from .._torch.tensors import version_of
from ..devices.devices import is_asynchronous
from ..devices.ownership import copying

# Copies that are under way each way at once: one that is copied, and one that is computed with or
# made meanwhile.
AHEAD = 2


class HostLink:
    """The traffic of one step between a device and host memory.

    Args:
        device: an accelerator's.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = _streams_of(device)
        self._departures: deque[_Departure] = deque()
        self._free: dict[int, list[tuple[Tensor, torch.Event | None]]] = {}

    def send(self, tensor: Tensor) -> tuple[Tensor, _Departure]:
        """Begin to copy a tensor's storage; return the copy and what is on its way."""
        source = bytes_of(tensor.untyped_storage())
        computing = torch.accelerator.current_stream(source.device)
        host = self._pinned(source.numel())
        self.out.wait_event(computing.record_event())
        try:
            with self.out:
                host.copy_(source, non_blocking=True)
                departure = _Departure(tensor, computing, self.out.record_event())
        except BaseException:
            source.record_stream(self.out)  # the copy may be queued, with nothing to wait for
            raise
        self._departures.append(departure)
        if len(self._departures) > AHEAD:
            self.make_room()
        return host, departure

    def make_room(self) -> None:
        """Release the memory that has been on its way out for longest, before another storage sets
        out."""
        if self._departures:
            self._departures.popleft().let_go()

    def close(self) -> None:
        """Release all that is still under way; the pinned memory goes back to torch's cache."""
        while self._departures:
            self.make_room()
        self._free.clear()

    def _pinned(self, size: int) -> Tensor:
        """Return pinned memory, used before in this step if there is any. torch's cache hands
        memory out again only when the device is done with it, and the host is far ahead."""
        free = self._free.get(size)
        if not free:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host, read = free.pop()
        if read is not None:
            self.out.wait_event(read)
        return host

    def use_again(self, host: Tensor, read: torch.Event | None) -> None:
        """Offer pinned memory that nobody needs any more, once this event is over."""
        with ours():  # it may come from the middle of a backward
            self._free.setdefault(host.numel(), []).append((host, read))


@functools.cache
def _streams_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Return a stream out and one back, as a link carries both ways at once. They belong to the
    process: a device has few, and hands the same one out again."""
    return torch.Stream(device), torch.Stream(device)


class HostLinks:
    """The links of a step, by device."""

    def __init__(self) -> None:
        self._links: dict[torch.device, HostLink] = {}

    def of(self, device: torch.device) -> HostLink:
        """Return the link of a device."""
        link = self._links.get(device)
        return self._links.setdefault(device, HostLink(device)) if link is None else link

    def close(self) -> None:
        """Close all links at the end of the step."""
        for link in self._links.values():
            link.close()


class _Departure:
    """A storage that is on its way to the host; held until its compute stream waits for that."""

    __slots__ = ("_computing", "_version", "left", "tensor", "was_written")

    def __init__(self, tensor: Tensor, computing: torch.Stream, left: torch.Event) -> None:
        self.tensor: Tensor | None = tensor.detach()  # has its count of versions
        self.left = left
        self.was_written = False
        self._version = version_of(tensor)
        self._computing = computing

    def let_go(self) -> None:
        """Allow that the memory is used again, and that the storage is written to."""
        self.check()
        self._computing.wait_event(self.left)
        self.tensor = None

    def check(self) -> None:
        """Note whether the storage was written to while it was copied."""
        if self.tensor is not None and version_of(self.tensor) != self._version:
            self.was_written = True


class Store:
    """One storage in host memory, and on its device from shortly before it is read.

    Args:
        tensor: one with this storage.
        links: the step's.
        before: the one that was made before it, and that a backward reads after it.
    """

    def __init__(self, tensor: Tensor, links: HostLinks, before: Store | None = None) -> None:
        storage = tensor.untyped_storage()
        self.device = storage.device
        self.readers = 0  # how many are going to read it
        self.keeps = False  # on the device, once it is there again: it will be read twice
        self._reads = 0
        self._original = weakref.ref(storage)
        self._before = None if before is None else weakref.ref(before)
        self._back: Tensor | None = None
        self._on: torch.Stream | None = None  # what that was allocated on
        self._arrived: torch.Event | None = None
        self._is_awaited = False
        self._link: HostLink | None = None
        self._departure: _Departure | None = None
        if is_asynchronous(self.device):
            self._link = links.of(self.device)
            self._host, self._departure = self._link.send(tensor)
        else:
            self._host = bytes_of(storage).clone()

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether it holds this very storage; keys are used again when a storage is gone."""
        return self._original() is storage

    def read(self) -> Tensor:
        """Return the bytes on the device, for the current stream to read; the next ones set out."""
        if self._link is None:
            return self._host
        self.fetch()
        back = self._back
        assert back is not None
        if self._arrived is not None:
            computing = torch.accelerator.current_stream(self.device)
            computing.wait_event(self._arrived)
            if computing == self._on:
                self._is_awaited = True
            else:
                back.record_stream(computing)
        self._reads += 1
        if self._reads >= self.readers and not self.keeps:
            self._let_go()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch_last()
        return back

    def fetch_last(self) -> None:
        """Begin to bring this one back, and those that a backward reads after it."""
        store: Store | None = self
        under_way = 0
        while store is not None and under_way < AHEAD:
            if store._reads < store.readers:  # somebody is going to
                store.fetch()
                under_way += 1
            store = None if store._before is None else store._before()

    @property
    def was_written(self) -> bool:
        """Return whether the storage was written in place before the copy of it was over, so that
        the copy may be neither. A later write does no harm."""
        if self._departure is None:
            return False
        self._departure.check()
        return self._departure.was_written

    def fetch(self) -> None:
        """Begin to bring the bytes back to where the compute stream is now, without waiting."""
        link = self._link
        if self._back is not None or link is None:
            return
        assert self._departure is not None
        if self._departure.tensor is not None:  # it has not gone yet
            self._back = bytes_of(self._departure.tensor.untyped_storage())
            return
        link.make_room()
        computing = torch.accelerator.current_stream(self.device)
        back = torch.empty(self._host.numel(), dtype=torch.uint8, device=self.device)
        # Its memory may be in use until the compute stream comes here.
        link.back.wait_event(computing.record_event())
        link.back.wait_event(self._departure.left)
        try:
            with link.back:
                back.copy_(self._host, non_blocking=True)
                self._arrived = link.back.record_event()
        except BaseException:
            back.record_stream(link.back)
            raise
        self._back, self._on, self._is_awaited = back, computing, False

    def _let_go(self) -> None:
        """Release what came back; nobody may have read it, and so waited for it."""
        if self._back is not None and self._arrived is not None and not self._is_awaited:
            assert self._on is not None
            self._on.wait_event(self._arrived)
        self._back = None

    def __del__(self) -> None:
        # However it ends: the graph that reads it may end with the backward, or with a failure.
        if self._link is not None and self._departure is not None:
            self._let_go()
            self._link.use_again(self._host, self._arrived)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    with copying():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
