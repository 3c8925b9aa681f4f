"""The user's code of one forward, traced instruction by instruction."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...._common.collecting_garbage import CollectingGarbage
from ...._common.coverage.covered_code import Coverage
from ...._common.libraries import is_users
from ..evaluation.callers import caller_of
from ..evaluation.expressions import Frame
from ..evaluation.loops import Loops
from ..known_values import KnownValues
from ..missed.missed_branches import MissedBranches
from ..syntax.accesses import Access, accesses_of
from .checkpoints import CheckpointedFrames
from .pending_writes import PendingWrites


class TracedCode:
    """Tells of each access, when its instruction is about to run, and of the branches that a
    function did not take, when it is over.

    Args:
        known: what the forward has read and set.
        functions: the user's functions by the id of their code.
        pending: compares what instructions set.
        branches: notes what was not taken.
        hop: returns the hop that the forward is on.
        note: is told of the accesses of an instruction, with the frame and the hop.
        coverage: is told of each instruction.

    Attributes:
        returned: the code that has returned to a frame last, and its result, by the frame's id.
        checkpoints: the frames that checkpoints will run again.
    """

    def __init__(
        self,
        known: KnownValues,
        functions: Mapping[int, Sequence[types.FunctionType]],
        pending: PendingWrites,
        branches: MissedBranches,
        hop: Callable[[], int],
        note: Callable[[Iterable[Access], types.FrameType, int], None],
        coverage: Coverage,
    ) -> None:
        self._known, self._functions = known, functions
        self._pending, self._branches = pending, branches
        self._hop, self._note, self._coverage = hop, note, coverage
        self.returned: dict[int, tuple[types.CodeType, Any]] = {}
        self.checkpoints = CheckpointedFrames()
        self._codes: dict[int, tuple[types.CodeType, Any]] = {}  # kept alive
        self._hops: dict[int, dict[int, int]] = {}  # of each frame's instructions
        self._loops, self._collecting = Loops(), CollectingGarbage()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace this thread's code in a block. A tracer is paused; one that begins there stays."""
        before, ours = sys.gettrace(), self._called
        sys._getframe().f_trace_opcodes = True  # else 3.12.0 to 3.12.4 trace none at all
        sys.settrace(ours)
        try:
            with self._collecting:
                yield
        finally:
            if sys.gettrace() == ours:
                sys.settrace(before)
            self._pending.end_all()
            self.returned.clear()  # it holds tensors, and the graph behind them
            self.checkpoints.forget()

    def _called(self, frame: types.FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if id(code) not in self._codes:
            is_traced = is_users(frame.f_globals.get("__name__"))
            accesses = accesses_of(code) if is_traced else self._known.libraries.asks(code) or None
            self._codes[id(code)] = code, accesses
        if (accesses := self._codes[id(code)][1]) is None or self._collecting.now:
            return None
        if accesses is True:
            return self._known.libraries.runs(frame, self._hop)
        frame.f_trace = self._ran  # before the next line, which has no effect on 3.13.0 otherwise
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._hops.setdefault(id(frame), {-1: self._hop()})
        self.checkpoints.begins(frame)
        self._known.runs(code, self._hop())
        self._coverage.begins(frame, self._hop())
        return self._ran

    def _ran(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        self._pending.end(id(frame))
        if event == "opcode":
            self._coverage.of(frame.f_code).runs(frame.f_lasti, self._hop())
            if accesses := self._codes[id(frame.f_code)][1].get(frame.f_lasti):
                self._hops[id(frame)][frame.f_lasti] = hop = self._hop()
                self._note(accesses, frame, hop)
            if again := self._loops.goes_on(frame, self._hop, self._hops[id(frame)]):
                self._note(again, frame, self._hop())
        elif event == "exception":
            self._branches.turns.raises(frame, argument[0])
        elif event == "return":
            if self._branches.turns.is_over(frame):
                ran, accesses = self._hops.pop(id(frame)), self._codes[id(frame.f_code)][1]
                around = Frame(frame, self._functions, None), self._loops.ended(frame)
                self._branches.look(frame, accesses, ran, *around)
                self.returned[id(caller_of(frame))] = frame.f_code, argument
            self.checkpoints.ends(frame)
            self.returned.pop(id(frame), None)
        return self._ran
