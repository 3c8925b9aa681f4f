"""Tensors of another stage that a call is given, and finds in the user's state as well.

A sealed call gets such an argument as it is on the call's own stage. What it finds beside its
arguments nobody hands to it: that stays the tensor of the other stage, and may be the next
micro-batch's by then. An open call looks at each tensor that it reads. Operations do not tell where
the forward has found a tensor, but the user's code does.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import islice
from typing import Any

from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import leaves, tensors
from ...crossing.tags import TAG, MicrobatchKey, Tag
from ..calls import Call
from .recorder import Recorder

_MOST = 1_000  # of a container, the tensors that are looked at
_RUNS_CALL = Recorder.watched.__code__


class ReadBeside:
    """Open the calls that find an argument of theirs in the user's state.

    Args:
        key: the run that is watched.
        hop: returns the hop that the user's code is on.
        calls: yields the calls under way with their arguments, from the outside in.
    """

    def __init__(
        self,
        key: MicrobatchKey,
        hop: Callable[[], int],
        calls: Callable[[], Iterator[tuple[Call, set[int], object]]],
    ) -> None:
        self._key, self._hop, self._calls = key, hop, calls

    def found(self, owner: Any, value: Any, frame: types.FrameType, lasts: bool) -> None:
        """Note that the forward finds a value.

        Args:
            owner: the object, or the variable, that has it.
            value: the value.
            frame: the running frame.
            lasts: whether the owner was there before the forward.
        """
        if isinstance(owner, types.CellType) and self._is_own(owner, frame):
            return
        others = [t for t in islice(_tensors_in(value), _MOST) if self._is_of_another_hop(t)]
        if not others:
            return
        for call, given, args in self._calls():
            is_beside = lasts or any(owner is leaf for leaf in leaves(args))
            if is_beside and not given.isdisjoint(map(id, others)):
                call.open(f"it finds an argument beside its arguments, too ({users_line()})")

    def _is_of_another_hop(self, tensor: Tensor) -> bool:
        tag: Tag | None = getattr(tensor, TAG, None)
        return tag is not None and tag.key is self._key and tag.hop != self._hop()

    def _is_own(self, cell: types.CellType, frame: types.FrameType | None) -> bool:
        """Return whether a variable is one of the innermost call's own functions."""
        while frame is not None and frame.f_code is not _RUNS_CALL:
            for name in frame.f_code.co_cellvars:
                if name in frame.f_locals and _holds(cell, frame.f_locals[name]):
                    return True
            frame = frame.f_back
        return False


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, ContextVar):
        value = value.get(None)
    is_looked_into = isinstance(value, Tensor | tuple | list | dict | deque)
    return tensors([*value] if isinstance(value, deque) else value) if is_looked_into else iter(())
