"""Tensors that outlive a forward and that branches read or write which the recording did not take.

In a step, a read there is one that no hop is known for, and a write one that nobody waits for. The
versions of tensors tell only some of them: ``.data`` has its own, and to read before an earlier
micro-batch has written leaves no trace.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from ...entries import SharedChange
from ..evaluation.expressions import Frame
from ..evaluation.members import UNKNOWN
from ..evaluation.still_frames import StillFrame
from ..known_values import KnownValues
from ..questions.open_questions import any_open
from ..syntax.accesses import Access, accesses_of, conditions_of, loops_of, sources_of
from ..syntax.deciders import ends_of_loops
from ..values import SharedValue, shared_change
from .tensor_uses import ForwardsTensors, gradient_changes
from .used_tensors import GRADIENT, mode_of_norm, uses_of

_REMEDY = "read and write it on one hop"
_DECIDES = (bool, int, float, str, type(None), list, tuple, dict)


class MissedTensors:
    """The tensors that such branches use, with the hops that they are on.

    Args:
        known: the values that the forward has read and set.

    Attributes:
        lasts: says whether a tensor outlives the forward.
        statistics: those of normalizations that may learn or not, with the hop and the line.
        again: what the functions of checkpoints read, once more in the backward; likewise.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known_values = known
        self.statistics: list[tuple[Tensor, int, str]] = []
        self.again: list[tuple[Tensor, int, str]] = []
        # By the tensor, what of it, and whether it is for other sizes alone.
        self._known: dict[tuple[int, str, bool], SharedValue] = {}
        self.lasts: Callable[[Tensor], bool] = lambda tensor: False

    def note(self, accesses: Iterable[Access], frame: Frame, hop: int) -> bool:
        """Note what an instruction in such a branch would do, and return whether any data, or any
        size, leads there.

        Args:
            accesses: its accesses.
            frame: the frame that it is in, which may be over, or never run.
            hop: the hop that it is on.
        """
        by_size, found = self._known_values.is_of_other_sizes, [*accesses]
        if not by_size and self.is_closed(found[0].node, frame):
            return False
        for access in found:
            self.note_norm(access, frame, hop, of_forward=False)
            line = frame.line_of(access.node)
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                for use in uses_of(access, frame, self.lasts):
                    if access.is_said:
                        continue
                    key = id(use.tensor), use.key, by_size
                    known = self._known.setdefault(key, SharedValue(use.tensor, use.key))
                    if use.writes:
                        known.is_set(hop, line)
                        known.is_constant = False
                    if use.reads:
                        known.is_read(hop, line)
        return True

    def note_norm(self, access: Access, frame: Frame, hop: int, *, of_forward: bool) -> None:
        """Note a call of a function that normalizes, if it may learn statistics in one forward and
        only read them in another: so does one in such a branch.

        Args:
            access: the call.
            frame: the frame that it is in.
            hop: the hop that it is on.
            of_forward: whether it counts only if the forward has run it.
        """
        mode, known = mode_of_norm(access.node), self._known_values
        if mode is None or (of_forward and not (known.is_run and any_open([mode], frame, known))):
            return
        with contextlib.suppress(Exception):  # of an object that cannot be looked at
            line, uses = frame.line_of(access.node), uses_of(access, frame, self.lasts)
            self.statistics += [(use.tensor, hop, line) for use in uses if use.writes]

    def note_still(self, still: StillFrame, hop: int) -> None:
        """Note what a function would do that such a branch calls."""
        for accesses in accesses_of(still.f_code).values():
            still.f_lineno = accesses[0].node.lineno
            self.note(accesses, Frame(still, {}, None), hop)  # type: ignore[arg-type]

    def note_again(self, still: StillFrame, hop: int) -> None:
        """Note what a function would read once more in the backward that a checkpoint in such a
        branch calls."""
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        for accesses in accesses_of(still.f_code).values():
            for access in accesses:
                with contextlib.suppress(Exception):  # of an object that cannot be looked at
                    line, uses = frame.line_of(access.node), uses_of(access, frame, self.lasts)
                    self.again += [(use.tensor, hop, line) for use in uses if use.reads]

    def is_closed(self, node: ast.expr, frame: Frame) -> bool:
        """Return whether a condition around code is known to be the same for all data, and keeps
        it from running."""
        for condition in conditions_of(frame.code):
            asked_for = condition.asked_for(node)
            if asked_for is not None and self._decided(condition.test, frame) is (not asked_for):
                return True
        return False

    def _decided(self, test: ast.expr, frame: Frame) -> bool | None:
        """Return what a condition is for all data; ``None`` if that is not known."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found = self._decided(operand, frame)
                return None if found is None else not found
            case ast.BoolOp(op=op, values=values):
                every = {self._decided(one, frame) for one in values}
                ends = isinstance(op, ast.Or)
                return ends if ends in every else None if None in every else not ends
        if any_open([test], frame, self._known_values) or self._is_bound_anew(test, frame):
            return None
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[right]):
                both = frame.evaluated(left), frame.evaluated(right)
                is_same = both[0] is both[1]
                return (
                    None
                    if any(one is UNKNOWN for one in both)
                    else is_same is isinstance(how, ast.Is)
                )
            case ast.Call(func=ast.Name("isinstance"), args=[one, kinds]):
                both = frame.evaluated(one), frame.evaluated(kinds)
                is_known = all(value is not UNKNOWN for value in both)
                return isinstance(*both) if is_known else None
        value = frame.evaluated(test)
        return bool(value) if isinstance(value, _DECIDES) else None

    @staticmethod
    def _is_bound_anew(test: ast.expr, frame: Frame) -> bool:
        """Whether a condition asks for a variable that may name several objects in one call; of
        tensors it asks for no more than for their kind."""
        code = frame.code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        parts = [part for part in ast.walk(test) if isinstance(part, ast.Name)]
        names = {one.id for one in parts if not isinstance(frame.evaluated(one), Tensor)}
        if ends_of_loops(code):  # the turns that did not come are others
            looped = (part for target, _ in loops_of(code) for part in ast.walk(target))
            if not names.isdisjoint(part.id for part in looped if isinstance(part, ast.Name)):
                return True
        return any(len(sources_of(code, name)) + (name in given) > 1 for name in names)

    def shared(self, forward: ForwardsTensors) -> Iterator[SharedChange]:
        """Yield the tensors that one hop writes and another one uses, one of them in such a branch.

        Args:
            forward: tells what the recorded forward does with tensors.
        """
        return self._shared(self.uses(forward).values(), forward)

    def uses(self, forward: ForwardsTensors) -> Mapping[tuple[int, str], SharedValue]:
        """Return what such branches do with tensors, by the tensor's id and what of it.

        Args:
            forward: as in :meth:`shared`.
        """
        uses = (known for (_, _, by_size), known in self._known.items() if not by_size)
        return {(id(known.owner), known.key): known for known in forward.merged(uses)}

    def shared_by_size(self, forward: ForwardsTensors) -> str:
        """Return the line that uses what another hop writes if micro-batches of other sizes come;
        empty if there is none.

        Args:
            forward: as in :meth:`shared`.
        """
        return next((c.where for c in self._shared(self._known.values(), forward)), "")

    @staticmethod
    def _shared(uses: Iterable[SharedValue], forward: ForwardsTensors) -> Iterator[SharedChange]:
        for known in forward.merged(uses):
            name, info, is_written = forward.told(known.owner)
            recorded, line = ([], "") if info is None else (info.hops, info.where)
            if known.key == GRADIENT:
                yield from gradient_changes(known, info)
                continue
            if is_written and len(recorded) > 1:
                continue  # it is refused as it is
            for hop in recorded:
                known.is_read(hop, line)
                if is_written:
                    known.is_set(hop, line)
            hops = known.set_on | known.read_on
            if known.set_on and len(hops) > 1:
                where = known.first_read or known.first_write
                change = shared_change(known, name, known.read_on or hops, where, _REMEDY)
                change.schedule = "uncut"
                yield change
