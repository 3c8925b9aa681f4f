"""Where all processes of a pipeline read what becomes of the others: torch's store."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..._torch.processes import shared_store

_TIMEOUT = datetime.timedelta(seconds=10)  # for a store that has gone with its machine


@dataclass(frozen=True)
class Beat:
    """A sign of life of a process.

    Attributes:
        number: another one each time.
        count: as in ``ProcessProgress``.
        status: what the process is doing, in words.
        is_inside: as in ``ProcessProgress``.
        is_waiting: as in ``ProcessProgress``.
        is_lost: as in ``ProcessProgress``.
        has_left: whether it has no pipeline any more.
        stack: of its code, if it has not gone on for long.
    """

    number: int = 0
    count: int = 0
    status: str = "has not begun"
    is_inside: bool = False
    is_waiting: bool = False
    is_lost: bool = False
    has_left: bool = False
    stack: str = ""


@dataclass(frozen=True)
class Verdict:
    """Why the pipeline has failed. It stays.

    Attributes:
        text: for the error.
        stalled: the ranks that are to blame because they do not go on.
    """

    text: str
    stalled: list[int] = field(default_factory=list)


class Board:
    """The signs of life of all processes, and the verdict.

    It has a connection of its own to the store, for that of torch's is taken while a process waits
    for a key.

    Args:
        prefix: of the keys; the same in every process, and another one for each pipeline.
        rank: this process's.
        members: the ranks of all.
    """

    def __init__(self, prefix: str, rank: int, members: Sequence[int]) -> None:
        self._store = shared_store().clone()
        self._store.set_timeout(_TIMEOUT)
        self._prefix = prefix
        self._rank = rank
        self._members = members

    def set_beat(self, beat: Beat) -> None:
        """Give a sign of life."""
        self._store.set(self._key(self._rank), json.dumps(asdict(beat)))

    def beat(self, rank: int) -> Beat:
        """The last sign of life of a process."""
        key = self._key(rank)
        return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else Beat()

    def beats(self) -> dict[int, Beat]:
        """The last signs of life of all processes."""
        keys = [self._key(rank) for rank in self._members]
        if self._store.has_extended_api() and self._store.check(keys):
            found = self._store.multi_get(keys)
            return {
                rank: Beat(**json.loads(text))
                for rank, text in zip(self._members, found, strict=True)
            }
        return {rank: self.beat(rank) for rank in self._members}

    def verdict(self) -> Verdict | None:
        """The verdict, if there is one."""
        key = self._key("verdict")
        if not self._store.check([key]):
            return None
        return Verdict(**json.loads(self._store.get(key)))

    def decide(self, verdict: Verdict) -> Verdict:
        """Set the verdict; return it, or the one that was set before."""
        text = json.dumps(asdict(verdict))
        return Verdict(**json.loads(self._store.compare_set(self._key("verdict"), "", text)))

    def _key(self, what: object) -> str:
        return f"{self._prefix}/{what}"
