"""Where a run is. The parts of a run share this, so that none of them needs the run itself: a part
that held the run would be a reference cycle, and keep a micro-batch's tensors until the next
garbage collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..tags import MicrobatchKey, Tag


class Listener(Protocol):
    """An observer of what a run does. A recording has one; an ordinary run has none, and pays for
    it only a comparison with ``None`` where something rare happens."""

    def departs(self, stage: int) -> None:
        """Note that the run is about to begin a new hop on a stage; the step's route must have that
        hop."""

    def arrived(self) -> None:
        """Note that the run is on the new hop."""

    def made(self, tensor: Tensor) -> Tag | None:
        """Return the tag for a tensor that was made here, or ``None`` to leave the tensor
        untagged."""

    def imported(self, tensor: Tensor, home_hop: int, name: str | None) -> None:
        """Note that a tensor was copied to this hop; ``name`` is that of a parameter or buffer."""

    def wrote_across(self, tensor: Tensor) -> None:
        """Note that an operation wrote in place to a copy of a tensor of an earlier hop."""


class Reads(list[tuple[Tensor, Any]]):
    """The tensors that one operation reads from elsewhere, each with what stands in for it.

    A list, for one is made for every operation, and most stay empty.

    Attributes:
        outside: tensors that no run has made and that are read as they are, with their versions.
            An operation that writes to one makes it this micro-batch's.
    """

    outside: tuple[tuple[Tensor, int], ...] = ()


@dataclass(slots=True, eq=False)
class Place:
    """The hop and the stage that a run is on, -1 before its first operation.

    Attributes:
        key: which run it is; every tensor that the run makes is tagged with this.
        microbatch: the index of the run's micro-batch.
        listener: notices what the run does, if it is recorded.
    """

    key: MicrobatchKey
    microbatch: int
    listener: Listener | None = None
    hop: int = -1
    stage: int = -1

    def hop_from(self, stage: int) -> int:
        """Return the hop of code for which a mark has said the stage: from there on the next."""
        return 0 if self.hop < 0 else self.hop + (stage != self.stage)

    def tag(self, tensor: Tensor) -> Tag | None:
        """Return a tag for a tensor that was made here."""
        if self.listener is not None:
            return self.listener.made(tensor)
        return Tag(self.key, self.hop, self.stage)
