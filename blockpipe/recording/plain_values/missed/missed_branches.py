"""Find the code that the recorded micro-batch did not run, and another one may.

Conditions are the plain case. A ``for`` over what was found in the data, and an error that is
caught, decide as well which code runs. Most loops and handlers follow from no data, so that of
these only the code counts that they alone have kept from running.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ...calls import Call
from ..evaluation.expressions import Frame
from ..evaluation.loops import RunTurn, hop_before
from ..evaluation.other_values import OtherValues
from ..evaluation.sizes import Sizes
from ..evaluation.still_frames import Given, StillFrame
from ..known_values import KnownValues
from ..questions.chosen import Choices
from ..questions.open_questions import any_open
from ..still_code import Later, with_inner
from ..syntax.accesses import (
    Access,
    accesses_of,
    assignments_of,
    branches_of,
    conditions_of,
    handed_on,
    tests_of,
    turns_of,
)
from ..syntax.branches import is_in
from ..syntax.deciders import ends_of_loops, is_missed
from ..syntax.later_calls import codes_called_again, codes_called_later
from ..tensors.missed_tensors import MissedTensors
from ..tensors.untaken_branches import UntakenBranches
from ..values import back
from .missed_calls import NOTHING_GIVEN, MissedCalls
from .missed_turns import MissedTurns

_Accesses = Mapping[int, list[Access]]


class Noting(NamedTuple):
    """Notes what code that did not run would read and set.

    Attributes:
        accesses: those of an instruction, in a frame on a hop.
        still: those of a function, on a hop.
        late: those of functions that a backward would have called.
    """

    accesses: Callable[[Iterable[Access], types.FrameType, int], None]
    still: Callable[[StillFrame, int], None]
    late: Callable[[list[StillFrame], int], None]


class MissedBranches:
    """Note what functions of one forward did not run, when they are over.

    Args:
        known: the values that the forward has read and set.
        sizes: tells what follows from the sizes of a micro-batch.
        noting: notes what did not run.
        tensors: is told of the tensors in both.
        untaken: is told of all reads in both, whatever the conditions are.
        call: returns the innermost call.
        fake: whether the forward runs on fake tensors; then it reads no data.

    Attributes:
        turns: the loops and the handlers of errors among them.
    """

    def __init__(
        self,
        known: KnownValues,
        sizes: Sizes,
        noting: Noting,
        tensors: MissedTensors,
        untaken: UntakenBranches,
        *,
        call: Callable[[], Call | None],
        fake: bool,
    ) -> None:
        self._known, self._sizes, self._fake = known, sizes, fake
        self._tensors, self._untaken, self._call = tensors, untaken, call
        self._closed = MissedCalls()
        self._note, self._note_still, self._note_late = noting
        self._calls = MissedCalls()
        self._ran, self._ran_of = set[types.CodeType](), set[tuple[types.CodeType, int]]()
        self._choices = Choices(known)
        self.turns = MissedTurns(known, fake=fake)

    def look(
        self,
        running: types.FrameType,
        accesses: _Accesses,
        hops: Mapping[int, int],
        frame: Frame,
        turns: Sequence[RunTurn],
    ) -> None:
        """Note the accesses in branches that a function did not take, and in what they call: a
        later step may take them by its data, its sizes, or what the forward has changed.

        Args:
            running: the frame of the function, at its end.
            accesses: all accesses of its code.
            hops: the hop of each instruction among these that has run.
            frame: the same frame, to evaluate in.
            turns: the turns of its loops that have run.
        """
        others_of = OtherValues(frame, turns)  # not kept: it holds what the frame has
        raised = self.turns.take_raised(running)
        self._ran.add(running.f_code)
        self._ran_of.add((running.f_code, _first_of(running)))
        self._note_handed_on(hops, frame)
        self._note_chosen(running, accesses, hops, frame)
        missed = accesses.keys() - hops.keys()
        if not missed and not any(isinstance(c, types.CodeType) for c in frame.code.co_consts):
            self._note_others_of_run((), accesses, hops, others_of)
            return
        self._note_untaken(missed, accesses, hops, frame)
        opened = set[int]()
        found = missed & self.turns.opened(running, accesses, hops, frame, raised)
        while new := (found | self._opened_by_conditions(missed, accesses, hops, frame)) - opened:
            opened |= new  # and what they set may open others
            self._note_each(new, accesses, hops, others_of)
        if not self._fake or any_open(tests_of(frame.code), frame, self._known):
            self._note_inner(opened, accesses, hops, frame)
        self._note_others_of_run(opened, accesses, hops, others_of)
        others = missed - opened
        if others and self._sizes.asked(turns_of(running.f_code), frame):
            self._note_each(others, accesses, hops, others_of, by_size=True)
            self._note_inner(others, accesses, hops, frame, by_size=True)

    def _opened_by_conditions(
        self, missed: set[int], accesses: _Accesses, hops: Mapping[int, int], frame: Frame
    ) -> set[int]:
        """Return the instructions that conditions may lead to in another forward."""
        is_open = any_open(tests_of(frame.code), frame, self._known)
        if not is_open and self._fake:
            return set()
        by_turns = set() if is_open else self.turns.within(frame.code, accesses, hops)
        closed = self._tensors.is_closed
        return {at for at in missed - by_turns if not closed(accesses[at][0].node, frame)}

    def _note_untaken(
        self, missed: Iterable[int], accesses: _Accesses, hops: Mapping[int, int], frame: Frame
    ) -> None:
        for offset in missed:
            hop, call = hop_before(offset, hops), self._call()
            self._untaken.note(accesses[offset], frame, (hop, call))
            for still in self._closed.behind(accesses[offset], frame, hop):
                self._untaken.note_still(still, (hop, call))

    def _note_handed_on(self, hops: Mapping[int, int], frame: Frame) -> None:
        """Note what functions would do that a function names and does not call by these names, and
        those that are written inside of it: from where it begins to where it ends."""
        for hop in {max(min(hops.values()), 0), max(hops.values())}:
            for still in self._handed_on(hop, frame):
                self._untaken.note_still(still, (hop, self._call()))

    def _handed_on(self, hop: int, frame: Frame) -> Iterator[StillFrame]:
        if any(isinstance(one, types.CodeType) for one in frame.code.co_consts):
            names = frame.frame.f_globals, frame.frame.f_locals
            for inner in StillFrame(frame.code, *names).inner():
                yield inner
                around = Frame(inner, {}, None)  # type: ignore[arg-type]
                for accesses in accesses_of(inner.f_code).values():
                    yield from self._closed.behind(accesses, around, hop)
        for node in handed_on(frame.code):
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                if isinstance(function := frame.bound(node), types.MethodType):
                    yield from self._closed.of(function, hop)

    def _note_chosen(
        self,
        running: types.FrameType,
        accesses: _Accesses,
        hops: Mapping[int, int],
        frame: Frame,
    ) -> None:
        """Note what the code would read or call that the data choose: by a key, an index, a name,
        or a condition."""
        for at, many in accesses.items():
            hop = hops[at] if at in hops else hop_before(at, hops)
            for access in many:
                with contextlib.suppress(Exception):  # of an object that cannot be looked at
                    others = [*self._choices.accesses(access, frame)]
                    self._note(others, running, hop)
                    call = access.node
                    if isinstance(call, ast.Call):
                        chosen = self._choices.objects(call.func, frame)
                        handed = self._choices.handed_on(call, frame)
                        self._note_others(chosen, hop, Given.by(call, frame))
                        self._note_others(handed, hop)

    def _note_others(
        self, functions: Iterable[Any], hop: int, given: Given = NOTHING_GIVEN
    ) -> None:
        later = Later([], [], [])
        for function in functions:
            if not self._has_run(function):
                found = self._calls.of(function, hop, given, later=later)
                self._note_called(found, later, hop)

    def _note_called(
        self, stills: Iterable[StillFrame], later: Later, hop: int, *, may_run: bool = True
    ) -> None:
        """Note functions that did not run, and what they hand to autograd.

        Args:
            stills: the functions.
            later: gets the others, while these are gone through.
            hop: the hop that they would have run on.
            may_run: whether any data, or any size, leads there.
        """
        for still in stills:
            self._note_still(still, hop)
            if may_run:
                self._tensors.note_still(still, hop)
        self._untaken.runs_again(later.rerun, hop)
        for still in later.again:
            self._note_still(still, back(hop))
            if may_run:
                self._tensors.note_again(still, hop)
        if later.called:
            self._note_late(later.called, back(hop))
            self._untaken.calls_late.add(hop)

    def _has_run(self, function: Any) -> bool:
        if isinstance(function, nn.Module):
            function = types.MethodType(type(function).forward, function)
        of = id(getattr(function, "__self__", None))
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        return (code, of) in self._ran_of or (code in self._ran and of == id(None))

    def _note_each(
        self,
        missed: Iterable[int],
        accesses: _Accesses,
        hops: Mapping[int, int],
        others: OtherValues,
        *,
        by_size: bool = False,
    ) -> None:
        with self._known.for_other_sizes() if by_size else contextlib.nullcontext():
            for offset in missed:
                found = accesses[offset]
                for one in (others.frame, *others.of(found)):
                    for hop in others.hops(one, found, offset, hops):
                        self._note_in(one, found, hop, by_size=by_size)

    def _note_in(
        self, frame: Frame, accesses: Sequence[Access], hop: int, *, by_size: bool = False
    ) -> None:
        self._note(accesses, frame.frame, hop)
        may_run = self._tensors.note(accesses, frame, hop)
        later = Later([], [], [])
        found = self._calls.behind(accesses, frame, hop, by_size=by_size, later=later)
        self._note_called(found, later, hop, may_run=may_run)

    def _note_others_of_run(
        self,
        opened: Container[int],
        accesses: _Accesses,
        hops: Mapping[int, int],
        others: OtherValues,
    ) -> None:
        """Note what code that did run would do with other objects: with another member of what its
        loop runs over, if the data choose the members, or with what a branch sets a variable to."""
        nodes = [accesses[at][0].node for at in accesses if at in opened]
        values = assignments_of(others.frame.code) if nodes else ()
        names = {name for name, value in values if any(is_in([value], node) for node in nodes)}
        for at, found in accesses.items():
            if at in hops:
                turned = self._chosen_in_turns(found[0].node, others.frame)
                # Of these the last one is there now, with which it may not have run.
                in_turns = others.of(found, turned, is_present_known=False)
                for one in (*others.of(found, names), *in_turns):
                    for hop in others.hops(one, found, at, hops):
                        self._note_in(one, found, hop)

    def _chosen_in_turns(self, node: ast.expr, frame: Frame) -> set[str]:
        """Return the variables of the loops around an expression that is in a branch of them which
        the data choose, or that the data end."""
        loops = [turn for turn in branches_of(frame.code) if turn.is_loop and turn.has(node)]
        if not loops:
            return set()
        found, ends = set[str](), ends_of_loops(frame.code)
        for condition in conditions_of(frame.code):
            is_around = condition.asked_for(node) is not None or condition.test in ends
            if is_around and any_open([condition.test], frame, self._known):
                around = [one for one in loops if one.has(condition.test)]
                parts = (part for one in around if one.target for part in ast.walk(one.target))
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
        return found

    def _note_inner(
        self,
        opened: Container[int],
        accesses: _Accesses,
        hops: Mapping[int, int],
        frame: Frame,
        *,
        by_size: bool = False,
    ) -> None:
        """Note what functions, and comprehensions, would do that are written in such branches."""
        names = frame.frame.f_globals, frame.frame.f_locals
        first = StillFrame(frame.code, *names, cells=getattr(frame.frame, "f_cells", None))
        begun = {_begins(accesses[at][0].node): at for at in hops if at in accesses}
        with self._known.for_other_sizes() if by_size else contextlib.nullcontext():
            for inner in with_inner(first):
                inside = accesses_of(inner.f_code)
                node = next((many[0].node for many in inside.values()), None)
                if node is None or inner.f_code is frame.code or inner.f_code in self._ran:
                    continue
                has_not_run = is_missed(node, frame.code, accesses, hops, opened)
                if not has_not_run or (not by_size and self._tensors.is_closed(node, frame)):
                    continue
                before = [begins for begins in begun if begins < _begins(node)]
                hop = hops[begun[max(before)]] if before else min(hops.values())
                around, later = Frame(inner, {}, None), Later([], [], [])  # type: ignore[arg-type]
                called = (
                    self._calls.behind(m, around, hop, by_size=by_size, later=later)
                    for m in inside.values()
                )
                stills = [inner, *itertools.chain.from_iterable(called)]
                if inner.f_code in codes_called_later(frame.code):
                    later.called.extend(stills)
                    stills = []
                elif inner.f_code in codes_called_again(frame.code):
                    later.again.extend(stills)
                    later.rerun.append(inner.f_code)
                self._note_called(stills, later, hop)


def _first_of(running: types.FrameType) -> int:
    """The id of the first argument of a running function, which of a method is its object."""
    names = running.f_code.co_varnames[: running.f_code.co_argcount]
    return id(running.f_locals.get(names[0])) if names else id(None)


def _begins(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset
