"""The plain values that a traced forward reads and sets, each with its place."""

from __future__ import annotations

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
    read_on: set[int] = field(default_factory=set)
    counted_on: set[int] = field(default_factory=set)
    is_carried: bool = False  # what one forward leaves there the next one reads
    is_traced: bool = False  # whether the user's own code sets it
    is_constant: bool = True  # all values that it is set to may be equal in each forward


@dataclass
class PendingWrite:
    """An instruction that sets a value, and has not ended yet."""

    owner: Any
    key: Any
    before: Any
    hop: int
    line: str
