"""What the variables of a function may stand for where it did not run, or with other data."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...._common.libraries import is_users
from ..syntax.accesses import Access, names_bound
from ..syntax.effects import arguments_of
from .expressions import Frame
from .loops import RunTurn, hop_before
from .members import UNKNOWN
from .still_frames import StillFrame, or_unknown, spread

_FUNCTIONS = (ast.Lambda, ast.Name, ast.IfExp, ast.BoolOp, ast.Call)


class OtherValues:
    """The members of what a function's loops run over, and all that it sets its variables to.

    Args:
        frame: the frame of the function, at its end.
        run: the turns of its loops that have run.
    """

    def __init__(self, frame: Frame, run: Sequence[RunTurn]) -> None:
        self.frame, self._run = frame, run
        self._names = names_bound(frame.code)
        self._turns: list[StillFrame] | None = None

    def of(
        self,
        accesses: Sequence[Access],
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
        others = _named_in(accesses).intersection(self._names if names is None else names)
        # Of a frame that does not run, the results of calls are known as well.
        is_unknown = names is None and any(self._is_unknown(a.node) for a in accesses)
        if not others and not is_unknown:
            return
        if self._turns is None:
            first = self._first()
            found = spread(first, lambda still: itertools.chain(still.set_anew(), still.turns()))
            self._turns = [*found]
        leaves_out = is_present_known and not is_unknown
        seen = {_stand_for(others, self.frame.frame.f_locals)} if leaves_out else set()
        known = [still for still in self._turns if others <= still.f_locals.keys()]
        for still in known or self._turns:
            values = _stand_for(others, still.f_locals)
            if values not in seen:
                seen.add(values)
                yield Frame(still, {}, None)  # type: ignore[arg-type]

    def hops(
        self, other: Frame, accesses: Iterable[Access], offset: int, hops: Mapping[int, int]
    ) -> set[int]:
        """Return the hops on which an instruction runs with what variables stand for in another
        frame: those of the turns with these, else the last one that it, or one before it, was on.

        Args:
            other: the other frame.
            accesses: of the instruction.
            offset: its offset.
            hops: the hops of those that have run.
        """
        latest = hops[offset] if offset in hops else hop_before(offset, hops)
        if other is self.frame or not self._run:
            return {latest}
        known = {n: v for n, v in other.frame.f_locals.items() if not isinstance(v, Tensor)}
        asked = {n: id(known[n]) for n in _named_in(accesses) & self._names & known.keys()}
        found = {
            max(hop for known, hop in turn.hops.items() if known <= offset)  # hops only go up
            for turn in self._run
            if all(turn.bound.get(name) == value for name, value in asked.items())
        }
        return found if asked and found else {latest}

    def _is_unknown(self, node: ast.expr) -> bool:
        owner = getattr(node, "func", getattr(node, "value", None))
        if isinstance(owner, ast.expr) and or_unknown(self.frame.evaluated, owner) is UNKNOWN:
            return True
        return any(map(self._may_be_function, arguments_of(node)))

    def _may_be_function(self, node: ast.expr) -> bool:
        """Whether an argument that is not known may be a function, or an object with one."""
        if not isinstance(node, _FUNCTIONS) or or_unknown(self.frame.bound, node) is not UNKNOWN:
            return False
        made_by = or_unknown(self.frame.bound, node.func) if isinstance(node, ast.Call) else None
        return made_by is None or is_users(getattr(made_by, "__module__", None))

    def _first(self) -> StillFrame:
        names = self.frame.frame.f_globals, self.frame.frame.f_locals
        cells = getattr(self.frame.frame, "f_cells", None)
        return StillFrame(self.frame.code, *names, cells=cells)


def _named_in(accesses: Iterable[Access]) -> set[str]:
    parts = (part for one in accesses for part in ast.walk(one.node))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _stand_for(names: Iterable[str], known: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(id(known.get(name, UNKNOWN)) for name in names)
