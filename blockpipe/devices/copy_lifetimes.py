"""Memory that one stream owns and another one uses: when it may be written, or used again.

``record_stream`` would keep a block until its device has come to where the host let go of it. The
host queues a whole step long before that, so that each micro-batch would take new memory. Here
the stream that owns a block is told to wait for the one that uses it, before the block is let go:
from then on the owner's order protects it, and it can be used again at once, however far the host
is ahead. Such a wait costs nothing where it is queued so late that it is over when the device comes
to it.
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
    waits for the copies where this could happen next, when they are long over: a wait behind every
    copy would make the device stand still, and ``record_stream`` protects from reuse only, and
    keeps the memory until the device has come as far as the host.
    """

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, list[tuple[Tensor, torch.Event]]] = {}

    def add(self, owner: Hashable, sent: PendingCopy) -> None:
        """Note what is being read, if anything is, and to whom it belongs."""
        if sent.source is not None and sent.arrived is not None:
            self._by_owner.setdefault(owner, []).append((sent.source, sent.arrived))

    def settle(self, owner: Hashable) -> None:
        """Have the streams that own this owner's tensors wait for the copies of them."""
        for source, arrived in self._by_owner.pop(owner, ()):
            torch.accelerator.current_stream(source.device).wait_event(arrived)

    def settle_on(self, device: torch.device) -> None:
        """The same for everything on a device."""
        for owner in [o for o, lent in self._by_owner.items() if lent[0][0].device == device]:
            self.settle(owner)

    def settle_all(self) -> None:
        """The same for everything."""
        for owner in list(self._by_owner):
            self.settle(owner)

    def reads(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these tensors' memory is being copied."""
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
        """The values, as :meth:`Sent.receive` has them; they are kept until the hop is over."""
        owner = sent.owner
        if owner is None:
            return sent.receive()
        value = sent.receive(keeps=True)
        with copying(), without_torch_functions():
            self._by_hop.setdefault(hop, []).append((value.detach(), owner))
        return value

    def pop(self, hop: int) -> list[tuple[Tensor, torch.Stream]]:
        """What a hop has read, with its owners."""
        return self._by_hop.pop(hop, [])

    def of(self, hop: int) -> list[Tensor]:
        """The values that a hop reads."""
        return [value for value, _ in self._by_hop.get(hop, ())]

    def hops(self) -> list[int]:
        """The hops that have read any."""
        return list(self._by_hop)

    def drop(self) -> None:
        """Nobody says when the hops are over: each device will have come there."""
        for hop in self.hops():
            for value, _ in self.pop(hop):
                _keep_until_read(value)


class FinishedCopies:
    """Copies that a step's hops have read to the end.

    They go back to the copy streams when the next micro-batch is done with the hop. If these waited
    at once, the next copy would not begin before this micro-batch's work on the hop is over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, list[tuple[Tensor, torch.Stream, torch.Event]]] = {}

    def add(self, hop: int, taken: list[tuple[Tensor, torch.Stream]], over: torch.Event) -> None:
        """A micro-batch is done with a hop, and what it read there is behind this event."""
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
        """Let go of everything: the step is over."""
        with self._lock:
            for hop in list(self._last):
                self._let_go(hop)


def _is_held_elsewhere(value: Tensor) -> bool:
    """Whether anybody but us has a tensor of this storage, and so a say in when it goes."""
    return holders_of(value.untyped_storage()) > 2  # the tensor, and Python's own storage


def _keep_until_read(value: Tensor) -> None:
    with copying(), without_torch_functions():
        value.record_stream(torch.accelerator.current_stream(value.device))
