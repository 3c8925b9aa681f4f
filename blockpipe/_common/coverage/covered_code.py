"""The instructions of the user's functions that recorded forwards have run, and on which hops."""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

# They only move what a function has at hand, or build from it: nothing that another hop could see.
_INSIDE = (
    *("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "PUSH_NULL", "MAKE_"),
    *("LOAD_CONST", "LOAD_FAST", "LOAD_SMALL", "LOAD_CLOSURE", "LOAD_ASSERTION", "STORE_FAST"),
    *("DELETE_FAST", "COPY", "SWAP", "POP_", "JUMP_", "RETURN_", "END_", "BUILD_", "NOT_TAKEN"),
    *("TO_BOOL", "PUSH_EXC", "CHECK_EXC", "RERAISE", "WITH_EXCEPT", "CLEANUP", "IS_OP"),
    *("UNARY_NOT", "SET_FUNCTION", "GET_AWAITABLE", "LIST_TO_TUPLE", "INSTRUMENTED"),
)


_PASSING = (Tensor, dict, list, set, tuple, deque, types.FunctionType, types.MethodType)
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])


@functools.lru_cache(1_000)
def effects_of(code: types.CodeType) -> Mapping[int, int]:
    """Return the instructions that may do more than move a function's own values.

    Returns:
        By the offset of each, that of the first instruction of its line, if one comes after the
        other from there on; else -1.
    """
    begun, found = {offset for offset, _ in dis.findlinestarts(code)}, dict[int, int]()
    first = 0
    for instruction in dis.get_instructions(code):
        first = instruction.offset if instruction.offset in begun else first
        if not instruction.opname.startswith(_INSIDE):
            found[instruction.offset] = first
        if instruction.opcode in _JUMPS:
            first = -1
    return found


class CoveredCode:
    """What forwards have run of one function.

    Args:
        code: of the function.

    Attributes:
        code: the same.
        effects: what :func:`effects_of` returns.
        ran: the hops and offsets of such instructions that have run.
        begun: the hops on which it has begun, each with the objects that it was given, by id, of
            those that count.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.code, self.effects = code, effects_of(code)
        self.ran, self.begun = set[tuple[int, int]](), set[tuple[int, tuple[int, ...]]]()

    def runs(self, offset: int, hop: int) -> None:
        """A recorded forward runs an instruction on a hop."""
        if offset in self.effects:
            self.ran.add((hop, offset))

    def add(self, other: CoveredCode) -> None:
        """Take in what others have run."""
        self.ran |= other.ran
        self.begun |= other.begun

    def stays_on(self, hop: int) -> bool:
        """Return whether no instruction of it has run on another hop."""
        return all(one == hop for one, _ in self.ran)

    def open(self) -> frozenset[int]:
        """Return the offsets of the instructions that have not run on each hop that it begins on:
        if that is one, on any, for it may go on to others."""
        hops, ran = {hop for hop, _ in self.begun}, {offset for _, offset in self.ran}
        if len(hops) > 1:
            ran = {o for o in ran if all((hop, o) in self.ran for hop in hops)}
        return frozenset(self.effects.keys() - ran)

    def open_lines(self) -> dict[int, int] | None:
        """Return the lines that are open as a whole: by the offset of their first instruction the
        first one of them that is open. ``None``: of some, a part has run."""
        opened, lines = self.open(), dict[int, int]()
        for offset in sorted(opened):
            lines.setdefault(self.effects[offset], offset)
        whole = all(offset in opened for offset, line in self.effects.items() if line in lines)
        return lines if whole and -1 not in lines else None


def line_of(code: types.CodeType, offset: int | None) -> str:
    """Return the file and line of an instruction; without an offset, those of the function."""
    number = code.co_firstlineno
    for begin, line in dis.findlinestarts(code) if offset is not None else ():
        if offset is not None and begin <= offset and line:
            number = line
    return f"{code.co_filename}:{number}"


class Coverage:
    """What forwards have run of all functions of the user's.

    Args:
        owners: the objects that were there before the forward. Which of them a function is given
            counts; not of containers and functions, which come and go, and another one gets the id.

    Attributes:
        version: grows with it.
        read: the code of functions whose source was read in place of a run.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = {id(one): type(one) for one in owners if not isinstance(one, _PASSING)}
        self._of: dict[types.CodeType, CoveredCode] = {}  # what is compiled anew is equal
        self._by_id: dict[int, CoveredCode] = {}  # to hash a code takes long
        self.version, self.read = 0, set[types.CodeType]()

    def __iter__(self) -> Iterator[CoveredCode]:
        return iter([*self._of.values()])

    def of(self, code: types.CodeType) -> CoveredCode:
        """Return what is covered of a function, which is known from here on."""
        if (known := self.found(code)) is None:
            known = self._of[code] = self._by_id[id(code)] = CoveredCode(code)
        return known

    def found(self, code: types.CodeType) -> CoveredCode | None:
        """Return what is covered of a function, if it is known."""
        known = self._by_id.get(id(code))
        return known if known is not None and known.code is code else self._of.get(code)

    def leave_out(self, owners: Iterable[object]) -> None:
        """Have some objects not count: those of a batch, which the next one has others of."""
        for owner in owners:
            self._owners.pop(id(owner), None)

    def given_to(self, frame: types.FrameType) -> tuple[int, ...]:
        """Return the objects that count, by id, of those that a function is given."""
        code, known = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [known.get(name) for name in names]
        return tuple([id(one) for one in given if self._owners.get(id(one)) is type(one)])

    def begins(self, frame: types.FrameType, hop: int) -> None:
        """A recorded forward begins to run a function on a hop."""
        self.of(frame.f_code).begun.add((hop, self.given_to(frame)))

    def add(self, others: Iterable[CoveredCode]) -> None:
        """Take in what other forwards have run."""
        for covered in others:
            self.of(covered.code).add(covered)
        self.read |= others.read if isinstance(others, Coverage) else set()
        self.version += 1
