"""What the variables of a function may stand for where it did not run, or with other data."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..syntax.accesses import Access, names_bound
from .expressions import Frame
from .members import UNKNOWN
from .still_frames import StillFrame, or_unknown, spread


class OtherValues:
    """The members of what a function's loops run over, and all that it sets its variables to.

    Args:
        frame: the frame of the function, at its end.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._names = names_bound(frame.code)
        self._turns: list[StillFrame] | None = None

    def of(
        self,
        accesses: Iterable[Access],
        names: Collection[str] | None = None,
        *,
        is_present_known: bool = True,
    ) -> Iterator[Frame]:
        """Yield the frames in which variables of an instruction stand for other objects.

        Args:
            accesses: its accesses.
            names: the variables that may; by default, all that the function binds.
            is_present_known: whether what they stand for now is left out.
        """
        if names is not None and not names:
            return
        nodes = [one.node for one in accesses]
        parts = [part for node in nodes for part in ast.walk(node)]
        named = {part.id for part in parts if isinstance(part, ast.Name)}
        others = named.intersection(self._names if names is None else names)
        # Of a frame that does not run, the results of calls are known as well.
        is_unknown = names is None and any(map(self._is_unknown, nodes))
        if not others and not is_unknown:
            return
        if self._turns is None:
            first = self._first()
            found = spread(first, lambda still: itertools.chain(still.set_anew(), still.turns()))
            self._turns = [*found]
        leaves_out = is_present_known and not is_unknown
        seen = {_stand_for(others, self._frame.frame.f_locals)} if leaves_out else set()
        for still in self._turns:
            values = _stand_for(others, still.f_locals)
            if values not in seen:
                seen.add(values)
                yield Frame(still, {}, None)  # type: ignore[arg-type]

    def _is_unknown(self, node: ast.expr) -> bool:
        owner = getattr(node, "func", getattr(node, "value", None))
        return isinstance(owner, ast.expr) and or_unknown(self._frame.evaluated, owner) is UNKNOWN

    def _first(self) -> StillFrame:
        names = self._frame.frame.f_globals, self._frame.frame.f_locals
        cells = getattr(self._frame.frame, "f_cells", None)
        return StillFrame(self._frame.code, *names, cells=cells)


def _stand_for(names: Iterable[str], known: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(id(known.get(name, UNKNOWN)) for name in names)
