"""The plain values that a traced forward reads and sets, each with its place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SharedValue:
    """The value at one place, and the hops and lines that read or set it."""

    owner: Any
    key: Any
    first_write: str = ""
    first_read: str = ""
    set_on: set[int] = field(default_factory=set)
    set_again_on: set[int] = field(default_factory=set)  # in the backward, by a checkpoint
    read_on: set[int] = field(default_factory=set)
    counted_on: set[int] = field(default_factory=set)
    is_carried: bool = False  # what one forward leaves there the next one reads
    is_traced: bool = False  # whether the user's own code sets it
    is_constant: bool = True  # all values that it is set to may be equal in each forward
    is_run_again: bool = False  # what reads it, a checkpoint runs again
    is_read_outside: bool = False  # by code that the model does not reach, such as a hook's

    def is_set(self, hop: int, line: str) -> None:
        """Note that code on a hop sets it."""
        self.first_write = self.first_write or line
        self.set_on.add(hop)

    def is_read(self, hop: int, line: str) -> None:
        """Note that code on a hop reads it."""
        self.first_read = self.first_read or line
        self.read_on.add(hop)


@dataclass
class PendingWrite:
    """An instruction that sets a value, and has not ended yet."""

    owner: Any
    key: Any
    before: Any
    hop: int
    line: str
    apart: ApartRun | None  # the run apart from the forward that it is in


@dataclass
class ApartRun:
    """What code that runs apart from the forward does in its order: a hook, or a function that
    ``torch.utils.checkpoint`` runs again. What it has set itself nothing else carries to it."""

    came: set[Hashable] = field(default_factory=set)
    fresh: set[Hashable] = field(default_factory=set)

    def reads_its_own(self, where: Hashable) -> bool:
        """Note a read, and return whether it is of what was set here."""
        self.came |= set() if where in self.fresh else {where}
        return where in self.fresh

    def sets(self, where: Hashable) -> None:
        """Note that something is set."""
        self.fresh |= set() if where in self.came else {where}
