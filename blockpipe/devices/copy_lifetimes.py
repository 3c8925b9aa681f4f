"""Memory that one stream owns and another one uses: when it may be written or reused.

``record_stream`` would keep a block until its device has reached the point at which the host
released it. The host queues a whole step long before that, so that each micro-batch would take new
memory. Here the stream that owns a block waits for the one that uses it, before the block is
released: from then on the owner's order protects it, and it can be reused at once, however far the
host is ahead. Such a wait costs nothing if it is queued so late that it is over when the device
reaches it.
"""

import threading
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .._torch.modes import without_torch_functions
from .._torch.tensors import holders_of, storage_id
from .copies import PendingCopy
from .ownership import copying


class CopySources:
    """Tensors that are being copied to other devices, and when each copy is over.

    Until then a tensor must be neither written nor freed by the stream that owns it. That stream
    waits for the copies only before the next action that could do so, when they are long over. A
    wait behind every copy would stall the device, and ``record_stream`` protects from reuse only,
    and keeps the memory until the device has come as far as the host.
    """

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, list[tuple[Tensor, torch.Event]]] = {}

    def add(self, owner: Hashable, sent: PendingCopy) -> None:
        """Note the tensor that a copy reads, if it does, and its owner."""
        if sent.source is not None and sent.arrived is not None:
            self._by_owner.setdefault(owner, []).append((sent.source, sent.arrived))

    def settle(self, owner: Hashable) -> None:
        """Make the streams of this owner's tensors wait for the copies of them."""
        for source, arrived in self._by_owner.pop(owner, ()):
            torch.accelerator.current_stream(source.device).wait_event(arrived)

    def settle_on(self, device: torch.device) -> None:
        """Make them wait for the copies of all tensors on a device."""
        for owner in [o for o, lent in self._by_owner.items() if lent[0][0].device == device]:
            self.settle(owner)

    def settle_all(self) -> None:
        """Make them wait for the copies of all tensors."""
        for owner in list(self._by_owner):
            self.settle(owner)

    def reads(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the memory of one of these tensors is being copied."""
        storages = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        return any(
            storage_id(source.untyped_storage()) in storages
            for lent in self._by_owner.values()
            for source, _ in lent
        )

    def __bool__(self) -> bool:
        return bool(self._by_owner)


class ReadCopies:
    """Copies that one run's hops read: owned by the copy streams, used by compute streams."""

    def __init__(self) -> None:
        self._by_hop: dict[int, list[tuple[Tensor, torch.Stream]]] = {}

    def receive(self, hop: int, sent: PendingCopy) -> Tensor:
        """Return the values for the current stream to read; they are kept until the hop ends."""
        owner = sent.owner
        if owner is None:
            return sent.receive()
        value = sent.receive(keeps=True)
        with copying(), without_torch_functions():
            self._by_hop.setdefault(hop, []).append((value.detach(), owner))
        return value

    def pop(self, hop: int) -> list[tuple[Tensor, torch.Stream]]:
        """Remove and return the values that a hop has read, with their owners."""
        return self._by_hop.pop(hop, [])

    def of(self, hop: int) -> list[Tensor]:
        """Return the values that a hop reads."""
        return [value for value, _ in self._by_hop.get(hop, ())]

    def hops(self) -> list[int]:
        """Return the hops that have read any."""
        return list(self._by_hop)

    def drop(self) -> None:
        """Release all values before the hops are over: ``record_stream`` keeps their memory."""
        for hop in self.hops():
            for value, _ in self.pop(hop):
                _keep_until_read(value)


class FinishedCopies:
    """Copies that a step's hops have read to the end.

    They return to the copy streams when the next micro-batch is done with the hop. If the streams
    waited at once, the next copy could not begin before this micro-batch's work on the hop is over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, list[tuple[Tensor, torch.Stream, torch.Event]]] = {}

    def add(self, hop: int, taken: list[tuple[Tensor, torch.Stream]], over: torch.Event) -> None:
        """Note the values that a micro-batch has read on a hop, and the event behind its reads."""
        kept = []
        for value, owner in taken:
            if _is_held_elsewhere(value):
                _keep_until_read(value)
            else:
                kept.append((value, owner, over))
        with self._lock:
            self._let_go(hop)
            self._last[hop] = kept

    def _let_go(self, hop: int) -> None:
        for _, owner, over in self._last.pop(hop, ()):
            owner.wait_event(over)

    def settle_all(self) -> None:
        """Release everything: the step is over."""
        with self._lock:
            for hop in list(self._last):
                self._let_go(hop)


def _is_held_elsewhere(value: Tensor) -> bool:
    """Return whether another holder of this storage decides when it is freed."""
    return holders_of(value.untyped_storage()) > 2  # the tensor, and Python's own storage


def _keep_until_read(value: Tensor) -> None:
    with copying(), without_torch_functions():
        value.record_stream(torch.accelerator.current_stream(value.device))
