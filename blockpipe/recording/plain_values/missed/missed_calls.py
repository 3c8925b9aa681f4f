"""Find the code that an instruction would run which did not run."""

from __future__ import annotations

import ast
import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..evaluation.calls_behind import called_at, handed_on_by
from ..evaluation.expressions import Frame
from ..evaluation.still_frames import Given, StillFrame
from ..still_code import Later, frames_of, note_later
from ..syntax.accesses import Access
from ..syntax.later_calls import called_later

NOTHING_GIVEN = Given()


class MissedCalls:
    """Find the code behind accesses that did not run; for each hop once."""

    def __init__(self) -> None:
        self._seen = set[tuple[Any, ...]]()
        self._kept: list[Any] = []  # so that no other object gets the id of one

    def behind(
        self,
        accesses: Iterable[Access],
        frame: Frame,
        hop: int,
        *,
        by_size: bool = False,
        later: Later | None = None,
    ) -> Iterator[StillFrame]:
        """Yield the user's functions that accesses of a branch would run.

        Args:
            accesses: of one instruction in the branch.
            frame: the frame that it is in, at its end.
            hop: the hop that the branch is on.
            by_size: whether only a micro-batch of another size takes the branch.
            later: gets those that autograd calls, as :func:`frames_of` says.
        """
        for access in accesses:
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                found = [_called(access, frame), *called_at(access, frame)]
                if isinstance(access.node, ast.Call):
                    found += handed_on_by(access.node, frame, called_later(access.node))
                    if later is not None:
                        note_later(access.node, frame, later)
                for function, given in found:
                    yield from self.of(function, hop, given, by_size=by_size, later=later)

    def of(
        self,
        function: Any,
        hop: int,
        given: Given = NOTHING_GIVEN,
        *,
        by_size: bool = False,
        later: Later | None = None,
    ) -> Iterator[StillFrame]:
        """Yield the frames of one function, if they are not known.

        Args:
            function: the function, or another object.
            hop: the hop that it would run on.
            given: its arguments.
            by_size: whether only a micro-batch of another size calls it.
            later: as in :meth:`behind`.
        """
        own = id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))
        key = *own, given.by_identity(), hop, by_size
        if callable(function) and key not in self._seen:
            self._seen.add(key)
            self._kept += [function, given]
            yield from frames_of(function, given, later=later)


def _called(access: Access, frame: Frame) -> tuple[Any, Given]:
    """Return what an access calls, and what that is given, as far as they are known."""
    node = access.node
    if isinstance(node, ast.Call):
        return frame.bound(node.func), Given.by(node, frame)
    if isinstance(node, ast.Attribute):
        bound = frame.bound(node)  # ``(self.a if … else self.b)(x)``
        if isinstance(bound, types.MethodType):
            return bound, NOTHING_GIVEN
    return None, NOTHING_GIVEN
