"""Check before a step that all processes do the same and that none has failed.

torch's engine does not check that. If shapes differ between processes, it returns wrong values or a
process waits for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .._common.callsite import users_line
from ..errors import RankError

_SHOWN = 1000  # bytes of each process's text


class Agreement:
    """A check that all processes of a group make together.

    Args:
        group: the processes; ``None`` takes all of them.
        device: the device of the tensors that are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group)

    @contextmanager
    def at_end(self, kind: Callable[[], str], asks: int = 0) -> Iterator[list[int]]:
        """Check at the end of a block that all processes do the same and that none has failed.

        Args:
            kind: returns a description of the next action, as for :meth:`check`.
            asks: bits that this process asks for.

        Yields:
            A list, in which the bits that any process asks for are at the end.
        """
        asked: list[int] = []
        what, failure = "", None
        try:
            what = kind()
            yield asked
        except Exception as error:
            failure = error
        asked.append(self.check(what, asks, failure))

    def check(self, what: str, asks: int = 0, failure: BaseException | None = None) -> int:
        """Check that all processes pass the same description.

        Args:
            what: a description of the next action, with the same words in all processes.
            asks: bits that this process asks for.
            failure: the error because of which this process cannot go on.

        Returns:
            The bits that any process asks for.

        Raises:
            BaseException: the failure, in the process that has it.
            RankError: another process has failed, or passes another description.
        """
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        given = torch.tensor([failure is not None, digest, asks], device=self._device)
        found = [row.tolist() for row in self._gathered(given)]
        if any(failed for failed, _, _ in found):
            text = "" if failure is None else f"{type(failure).__name__}: {failure}"
            texts = self._texts(text)
            if failure is not None:
                raise failure
            first = next(rank for rank, row in enumerate(found) if row[0])
            raise RankError(
                f"rank {first} failed before the step began, and nothing was sent "
                f"({users_line()}): {texts[first]}"
            )
        others = [rank for rank, row in enumerate(found) if row[1] != found[0][1]]
        if others:
            texts = self._texts(what)
            raise RankError(
                f"expected all processes to do the same, got {texts[0]} on rank 0 and "
                f"{texts[others[0]]} on rank {others[0]} ({users_line()}); pass arguments of the "
                "same shapes everywhere (values count on the first stage's rank, those of the "
                "target on the last stage's)"
            )
        bits = 0
        for _, _, asked in found:
            bits |= asked
        return bits

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self._ranks)]
        dist.all_gather(rows, tensor, group=self._group)
        return rows

    def _texts(self, text: str) -> list[str]:
        encoded = text.encode()[:_SHOWN].ljust(_SHOWN, b"\0")
        given = torch.tensor(list(encoded), dtype=torch.uint8, device=self._device)
        return [
            bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            for row in self._gathered(given)
        ]
