"""Check before a step that all processes do the same and that none has failed.

torch's engine does not check that. If shapes differ between processes, it returns wrong values or a
process waits for ever.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .._common.callsite import users_line
from ..errors import RankError
from .rank_failures.failures import Failures, root_of

_BEFORE = "failed before the step began, and nothing was sent"
CODE = "code between modules, and the values that it read"
"""The name of what the processes' recordings have, as digests."""

_REMEDIES = (
    "pass arguments of the same shapes everywhere (values count on the first stage's rank, those "
    "of the target on the last stage's), with the same model, options and versions",
    "set what that code reads (attributes, globals, settings) to the same values everywhere, and "
    "have modules return as many tensors, under the same keys, whatever their data is: each "
    "process has recorded the forward with its own",
)
UNLIKE = 1 << 30
"""The bit of a check that says that what processes go on with differs."""

_SHOWN = 5  # differences in a message, and ranks of each


@dataclass(frozen=True)
class Kind:
    """What a process is about to do, by names.

    Attributes:
        common: what is the same in all replicas.
        own: what is the same in the processes of one pipeline: replicas may have other batches.
        made: what they go on with, which may differ.
    """

    common: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    made: str = ""


class Agreement:
    """A check that all processes of a group make together.

    Args:
        group: the processes of the pipeline; ``None`` takes all of them.
        replicas: the processes that have the same stages as this one, if there are any. A check
            of the pipeline's processes and then of these reaches all processes of all replicas.
        device: the device of the tensors that are exchanged.
        failures: where agreement is noted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
        failures: Failures,
    ) -> None:
        self._group = group
        self._replicas = replicas
        self._device = device
        self._failures = failures

    @contextmanager
    def at_end(self, kind: Callable[[], Kind], asks: int = 0) -> Iterator[list[int]]:
        """Check at the end of a block that all processes do the same and that none has failed.

        Args:
            kind: returns a description of the next action, as for :meth:`check`; called after the
                block.
            asks: bits that this process asks for.

        Yields:
            A list, in which the bits that any process asks for are at the end.
        """
        asked: list[int] = []
        what, failure = Kind(), None
        try:
            with self._failures.progress.computing("what it does before a step"):
                yield asked
                what = kind()
        except Exception as error:
            failure = error
        asked.append(self.check(what, asks, failure))

    def check(self, kind: Kind, asks: int = 0, failure: BaseException | None = None) -> int:
        """Check that all processes pass the same description.

        Args:
            kind: a description of the next action, with the same words in all processes.
            asks: bits that this process asks for.
            failure: the error because of which this process cannot go on.

        Returns:
            The bits that any process of the pipeline asks for; and :data:`UNLIKE` where the
            descriptions differ in what is made.

        Raises:
            BaseException: the failure, in the process that has it.
            RankError: another process has failed, or passes another description.
        """
        said = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        return self._checked(kind, asks, failure, said, _BEFORE)

    def end(self, failure: BaseException | None) -> None:
        """Check at the end of a step that it has failed in no process.

        Args:
            failure: the error that it has ended with in this one.

        Raises:
            BaseException: the failure, in the process that has it.
            RankError: the step has failed in another process; with the traceback.
        """
        said = ""
        if failure is not None:
            said = "\n" + "".join(traceback.format_exception(root_of(failure)))
        self._failures.began = False  # once all know of it, they can go on
        self._checked(Kind({"call": "the end of a step"}), 0, failure, said, "failed in a step")
        self._failures.began = True

    def _checked(
        self, kind: Kind, asks: int, failure: BaseException | None, said: str, when: str
    ) -> int:
        self._failures.is_agreed = False
        self._failures.progress.done("what it does before a step")
        common, own = _digest(kind.common), _digest(kind.own)
        made = _digest({"made": kind.made})
        rows = self._rows([failure is not None, common, own, asks, made], self._group)
        is_trouble = any(row[0] for row in rows) or any(row[1:3] != rows[0][1:3] for row in rows)
        texts = []
        if is_trouble:
            texts = self._texts(said, kind.common, kind.own, self._group)
        trouble = _trouble(texts, when)
        if self._replicas is not None:
            rows_of_replicas = self._rows([is_trouble, rows[0][1]], self._replicas)
            first = rows_of_replicas[0]
            if any(row[0] or row[1] != first[1] for row in rows_of_replicas):
                texts = self._texts(trouble, kind.common, {}, self._replicas)
                troubles = [text.failure for text in texts if text.failure]
                trouble = troubles[0] if troubles else _trouble(texts, when)
        self._failures.is_agreed = True
        if failure is not None:
            raise failure
        if trouble:
            raise RankError(trouble)
        bits = 0
        for row in rows:
            bits |= row[3] | UNLIKE * (row[4] != made)
        return bits

    def _rows(self, row: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
        given = torch.tensor(row, dtype=torch.int64, device=self._device)
        return [found.tolist() for found in self._gathered(given, group)]

    def _gathered(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None
    ) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, tensor, group=group)
        return rows

    def _texts(
        self,
        failure: str,
        common: Mapping[str, str],
        own: Mapping[str, str],
        group: dist.ProcessGroup | None,
    ) -> list[_Text]:
        """What each process of a group says."""
        text = json.dumps([dist.get_rank(), failure, {**common, **own}]).encode()
        longest = max(row[0] for row in self._rows([len(text)], group))
        padded = list(text.ljust(longest))
        given = torch.tensor(padded, dtype=torch.uint8, device=self._device)
        return [_Text(*json.loads(bytes(row.tolist()))) for row in self._gathered(given, group)]


@dataclass(frozen=True)
class _Text:
    rank: int
    failure: str
    values: dict[str, str]


def _digest(values: Mapping[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([*values.items()]).encode()).digest()[:7])


def _trouble(texts: list[_Text], when: str) -> str:
    """What is wrong, if anything is; a failure is told with when it came."""
    for text in texts:
        if text.failure:
            return f"rank {text.rank} {when} ({users_line()}): {text.failure}"
    names = dict.fromkeys(name for text in texts for name in text.values)
    differing = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for text in texts:
            ranks.setdefault(text.values.get(name, "nothing"), []).append(text.rank)
        if len(ranks) > 1:
            each = (f"{value} on {_named(on)}" for value, on in [*ranks.items()][:_SHOWN])
            differing.append(f"{name}: {', '.join(each)}")
    if not differing:
        return ""
    more = f"; and {len(differing) - _SHOWN} others" if len(differing) > _SHOWN else ""
    return (
        f"expected all processes to do the same, got {'; '.join(differing[:_SHOWN])}{more} "
        f"({users_line()}); {_REMEDIES[differing[0].startswith(CODE)]}"
    )


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}{', …' if len(ranks) > _SHOWN else ''}"
