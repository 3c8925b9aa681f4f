"""What a forward calls in branches that the recorded micro-batch did not take."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .evaluation.expressions import Frame
from .evaluation.members import UNKNOWN, attribute_in
from .still_code import StillFrame, frames_of
from .syntax.accesses import Access


class MissedCalls:
    """Find the code behind accesses that did not run; for each hop once."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int, int, bool]] = set()
        self._kept: list[Any] = []  # so that no other object gets the id of one

    def behind(
        self, accesses: Iterable[Access], frame: Frame, hop: int, *, by_size: bool = False
    ) -> Iterator[StillFrame]:
        """Yield the user's functions that accesses of a branch would run.

        Args:
            accesses: of one instruction in the branch.
            frame: the frame that it is in, at its end.
            hop: the hop that the branch is on.
            by_size: whether only a micro-batch of another size takes the branch.
        """
        for access in accesses:
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                function, given = _called(access, frame)
                key = id(getattr(function, "__func__", function)), id(given), hop, by_size
                if callable(function) and key not in self._seen:
                    self._seen.add(key)
                    self._kept += [function, given]
                    yield from frames_of(function, given)


def _called(access: Access, frame: Frame) -> tuple[Any, Any]:
    """Return what an access calls, and its first argument, as far as they are known."""
    node = access.node
    if isinstance(node, ast.Call):
        function = frame.bound(node.func)
        given = getattr(function, "__self__", None)
        if given is None and node.args and not isinstance(node.args[0], ast.Starred):
            given = frame.evaluated(node.args[0])
            return function, None if given is UNKNOWN else given
        return function, None
    if isinstance(node, ast.Attribute):
        owner = frame.evaluated(node.value)
        found = attribute_in(owner, node.attr)
        if isinstance(found, property):
            return found.fset if access.writes else found.fget, owner
    return None, None
