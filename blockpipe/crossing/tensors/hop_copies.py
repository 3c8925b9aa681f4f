"""The copies between one run's hops: when they may begin, and how long their memory is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...devices.copies import PendingCopy
from ...devices.copy_lifetimes import CopySources, ReadCopies
from ...devices.devices import mark
from ..step_context import StepContext
from .place import Place


class HopCopies:
    """The copies that one run's hops send to each other.

    Args:
        step: what the run shares with the other runs of its step.
        place: where the run is.
    """

    def __init__(self, step: StepContext, place: Place) -> None:
        self._step = step
        self._place = place
        self._left: dict[int, torch.Event | None] = {}  # by hop: its tensors are computed
        self._lent = CopySources()  # by hop: its tensors that other hops are copying
        self._taken = ReadCopies()  # by hop: the copies that it reads

    def leave(self, hop: int, stage: int) -> None:
        """Note that the forward leaves a hop: its tensors can be copied behind what is queued by
        now."""
        self._left[hop] = self._step.mark(stage)

    def bring(self, tensor: Tensor, from_hop: int, *, on_host: bool) -> Tensor:
        """Return the values of another hop's tensor on this hop's device."""
        place, step = self._place, self._step
        watch = step.watch(tensor, from_hop, place.hop, place.microbatch)
        after = self._left.get(from_hop)
        sent = step.send(tensor, place.stage, after=after, watch=watch, on_host=on_host)
        self._lent.add(from_hop, sent)
        if self._lent and sent.arrived is None:
            self._lent.settle_on(tensor.device)  # an alias, and it may be written
        return self.receive(place.hop, sent)

    def receive(self, hop: int, sent: PendingCopy) -> Tensor:
        """Return values that were sent to a hop, there to be read until the hop is over."""
        return self._taken.receive(hop, sent)

    def settle(self, hop: int) -> None:
        """Wait for the copies of a hop's tensors, before these are written or freed."""
        self._lent.settle(hop)

    def give_back(self, hop: int, over: torch.Event | None = None) -> None:
        """Release the copies that were sent to a hop, which is over."""
        taken = self._taken.pop(hop)
        if taken:
            over = over or mark(taken[0][0].device)
            assert over is not None
            self._step.returned.add(hop, taken, over)

    def end_without_backward(self) -> None:
        """Release the tensors of all hops: the forward is over, and no backward follows."""
        late = [hop for hop in self._taken.hops() if self._is_read_later(hop)]
        self._lent.settle_all()
        for hop in self._taken.hops():
            self.give_back(hop, None if hop in late else self._left.get(hop))

    def _is_read_later(self, hop: int) -> bool:
        """Return whether what was sent to a hop may be read after the run has left it: by a later
        hop on the device, which has it as its own, or by a copy to another device."""
        step = self._step
        device = step.device_of(step.route[hop])
        later = step.route[hop + 1 : self._place.hop + 1]
        return any(step.device_of(stage) == device for stage in later) or self._lent.reads(
            self._taken.of(hop)
        )

    def settle_all(self) -> None:
        """Do what :meth:`settle` does for all hops at once, and release all that was sent to
        them."""
        self._lent.settle_all()
        self._taken.drop()
