"""Writes that an instruction begins and that are compared when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from torch import Tensor

from ...calls import Call
from ..evaluation.expressions import Frame
from ..evaluation.members import ALL, BY_ARGUMENT, UNKNOWN, Registered, member_of
from ..evaluation.sizes import BySize, Sizes
from ..known_values import KnownValues
from ..places import has_tensors, is_by_microbatch, makers_of, space_of
from ..questions.followed_from import Behind, behind_write
from ..syntax.accesses import Access, is_by_chance
from ..values import ApartRun, frozen

_Where = tuple[int, str, ApartRun | None, bool, bool, list[Call | None], bool]


@dataclass
class PendingWrite:
    """An instruction that sets a value, and has not ended yet."""

    owner: Any
    key: Any
    before: Any
    hop: int
    line: str
    apart: ApartRun | None  # the run apart from the forward that it is in
    again: bool  # whether a checkpoint's function does it, which runs once more
    adds: bool  # as ``self.n += 1`` does, which writes to a tensor in place
    calls: list[Call | None]
    is_fixed: bool  # whether it sets the same, whatever the data
    by_chance: bool  # whether it sets another value in each forward: the micro-batch's index
    by_size: BySize | None  # ``None``: it is the same for all sizes
    behind: Behind


class PendingWrites:
    """The writes of all frames.

    Args:
        known: the values that are told.
        sizes: tells what follows from the sizes of a micro-batch.
        fake: whether the forward runs on fake tensors; then no value depends on the data.
    """

    def __init__(self, known: KnownValues, sizes: Sizes, *, fake: bool) -> None:
        self._known, self._sizes, self._fake = known, sizes, fake
        self._writes: dict[int, list[PendingWrite]] = {}  # by the id of a frame
        self._same: list[PendingWrite] = []  # those that have set the value that was there

    def begin(
        self,
        places: Sequence[tuple[Any, Any, Any]],
        access: Access,
        frame: Frame,
        where: _Where,
    ) -> None:
        """Note the writes of an instruction that a frame is about to run.

        Args:
            places: what it sets: objects, keys and values.
            access: the access that sets them.
            frame: the frame that it is in.
            where: the fields of :class:`PendingWrite` from ``hop`` to ``is_fixed``.
        """
        by_chance = access.assigned is not None and is_by_chance(access.assigned, frame.code)
        behind = behind_write(access, frame) if places and frame.is_running else Behind()
        self._writes[id(frame.frame)] = [
            PendingWrite(
                owner,
                key,
                frozen(value),
                *where,
                by_chance,
                self._sizes.write(access, frame, owner, key),
                behind,
            )
            for owner, key, value in places
        ]

    def end(self, frame: int, *, to_anything: bool = False) -> None:
        """The instruction of a frame has ended.

        Args:
            frame: the frame, by its id.
            to_anything: whether it has not run, and may set any value.
        """
        for pending in self._writes.pop(frame, ()):
            if to_anything:
                pending.before, pending.is_fixed = UNKNOWN, False
            self._is_set(pending)

    def end_all(self) -> None:
        """All instructions have ended, and with them the forward."""
        for frame in [*self._writes]:
            self.end(frame)
        is_new = True
        while is_new:  # what is set may lead to others
            before, self._same = self._same, []
            for pending in before:
                self._may_set_others(pending)
            is_new = len(self._same) < len(before)

    def _may_set_others(self, pending: PendingWrite) -> None:
        """Note whether a later forward may set another value than was there, or another entry."""
        # What follows from itself alone has come to rest: a mean of values that are the same.
        own = space_of(pending.owner), pending.key
        others = [one for one in pending.behind.value if (space_of(one[0]), one[1]) != own]
        keys = [pending.key] if any(starmap(self._is_set_at, others)) else []
        keys += [ALL] if any(starmap(self._is_set_at, pending.behind.key)) else []
        for key in keys:
            known = self._known.at(pending.owner, key)
            known.is_set(pending.hop, pending.line, pending.calls)
            known.is_constant = known.is_fixed = False
        self._same += [] if keys else [pending]

    def _is_set_at(self, owner: Any, key: Any) -> bool:
        known = self._known.found_at(owner, key)  # not of other sizes, which are for themselves
        return known is not None and known.is_changed

    def _is_set(self, pending: PendingWrite) -> None:
        if is_by_microbatch(pending.owner):
            return
        value = member_of(pending.owner, pending.key)
        now, made_on = frozen(value), makers_of(value)
        if pending.apart is not None:
            pending.apart.sets((space_of(pending.owner), pending.key))
        known = self._known.at(pending.owner, pending.key)
        known.is_traced = True
        known.written_on.add(pending.hop)
        if not pending.adds:
            known.begun_on.setdefault(pending.hop, pending.line)
        known.is_bare = known.is_bare or made_on is None
        # On fake tensors the same is the same for all data.
        known.is_fixed = known.is_fixed and pending.is_fixed
        # Which members a module has is told by what is set, and not by the data.
        is_fixed = pending.is_fixed or isinstance(pending.key, Registered)
        settles = self._fake or is_fixed or (pending.adds and isinstance(value, Tensor))
        settles = settles and not (pending.by_chance and not has_tensors(value))
        known.lines.add(pending.line)
        if pending.by_size is not None:
            self._is_set_by_size(pending, pending.by_size)
        if not settles or now is UNKNOWN or pending.before != now:
            known.is_set(pending.hop, pending.line, pending.calls)
            known.made_on |= made_on or set()
            self._known.note_forward(known, value)
            if isinstance(pending.owner, dict) and pending.before is not UNKNOWN:
                self._known.at(pending.owner, BY_ARGUMENT).is_set(pending.hop, pending.line)
            if pending.again:
                known.set_again_on.add(pending.hop)
        elif any(pending.behind) and not isinstance(pending.key, Registered):
            known.follows = True
            self._same.append(pending)

    def _is_set_by_size(self, pending: PendingWrite, by_size: BySize) -> None:
        """Note that for other sizes an instruction sets another value, or another entry."""
        with self._known.for_other_sizes():
            known = self._known.at(pending.owner, ALL if by_size.key else pending.key)
            known.is_set(pending.hop, pending.line, pending.calls)
            known.is_constant = known.is_constant and by_size.alone
