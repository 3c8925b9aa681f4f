"""The code of the user's that the forwards of one step reach and no recording has run there."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch.compiler import is_compilers
from ..collecting_garbage import CollectingGarbage
from .code_events import told
from .covered_code import Coverage, CoveredCode, line_of


class Reached(NamedTuple):
    """An instruction on a hop.

    Attributes:
        code: of its function.
        hop: on which it is reached.
        offset: of the instruction; ``None``: the function begins.
        given: the objects, by id, that it is given, of those that count.
    """

    code: types.CodeType
    hop: int
    offset: int | None
    given: tuple[int, ...] = ()

    def is_in(self, coverage: Coverage) -> bool:
        """Return whether forwards have run it."""
        covered = coverage.found(self.code)
        if covered is None:
            return False
        if self.offset is None:
            return (self.hop, self.given) in covered.begun
        return (self.hop, self.offset) in covered.ran

    def begins_in(self, found: Coverage) -> bool:
        """Return whether it is a function that begins there of objects which have come since, and
        that a later forward runs: these were there before that one."""
        covered = found.found(self.code) if self.offset is None and not self.given else None
        return covered is not None and any(hop == self.hop for hop, _ in covered.begun)

    def add_to(self, coverage: Coverage) -> None:
        """Have it count as if forwards had run it, and a function as a whole."""
        covered = CoveredCode(self.code)
        if self.offset is None:
            covered.begun.add((self.hop, self.given))
        ran = covered.effects if self.offset is None else [self.offset]
        covered.ran.update((self.hop, offset) for offset in ran)
        coverage.add([covered])

    @property
    def where(self) -> str:
        """Its file and line."""
        return line_of(self.code, self.offset)


class Called(NamedTuple):
    """A function that has begun.

    Attributes:
        function: the function, with what it closes over.
        given: its arguments by name, but for tensors.
        hop: on which it has begun.
    """

    function: types.FunctionType
    given: Mapping[str, object]
    hop: int


CodeReached = Mapping[Reached, Called | None]
"""What a forward has reached first, with the functions that begin."""


class UncoveredCode:
    """What the forwards of one step reach.

    Args:
        coverage: what recordings have run.

    Attributes:
        found: what each micro-batch's forward has reached first, with the functions that begin.
    """

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self.found: dict[int, dict[Reached, Called | None]] = {}

    def noting(
        self, microbatch: int, hop: Callable[[], int], *, is_loss: bool = False
    ) -> AbstractContextManager[None]:
        """Note, while entered, what this thread's code reaches.

        Args:
            microbatch: whose forward runs.
            hop: returns the hop that its code is on.
            is_loss: whether its loss runs. No recording runs that; it reads its source.
        """
        return self._noting(_OfLoss if is_loss else _Of, microbatch, hop)

    def noting_backward(
        self, microbatch: int, number: int, device: torch.device
    ) -> AbstractContextManager[None]:
        """Note the same of a backward, which no recording runs either. What its forward has run may
        run once more.

        Args:
            microbatch: whose backward runs.
            number: that of the hop's backward.
            device: on which its operations run.
        """
        apart = None if device.type == "cpu" else device
        return self._noting(_OfBackward, microbatch, lambda: number, apart)

    @contextmanager
    def _noting(
        self,
        kind: type[_Of],
        microbatch: int,
        hop: Callable[[], int],
        device: torch.device | None = None,
    ) -> Iterator[None]:
        collecting = CollectingGarbage()
        listener = kind(self.found.setdefault(microbatch, {}), self._coverage, hop, collecting)
        with collecting, told(self._coverage, listener, device):
            yield


class _Of:
    """Listens for one micro-batch."""

    def __init__(
        self,
        found: dict[Reached, Called | None],
        coverage: Coverage,
        hop: Callable[[], int],
        collecting: CollectingGarbage,
    ) -> None:
        self._found, self._coverage, self._hop = found, coverage, hop
        self._collecting = collecting

    def begins(self, frame: types.FrameType) -> None:
        code = frame.f_code
        covered, hop = self._coverage.found(code), self._hop()
        given = self._coverage.given_to(frame)
        is_known = covered is not None and (hop, given) in covered.begun
        place = Reached(code, hop, None, given)
        is_new = not (is_known or place in self._found or self._collecting.now)
        if is_new and not _is_by_chance(frame):
            self._found[place] = _called(frame, hop)

    def reaches(self, code: types.CodeType, offset: int) -> None:
        covered, hop = self._coverage.found(code), self._hop()
        is_known = covered is None or (hop, offset) in covered.ran
        if not (is_known or self._collecting.now):
            self._found[Reached(code, hop, offset)] = None


class _OfLoss(_Of):
    """Listens to its loss."""

    def begins(self, frame: types.FrameType) -> None:
        if frame.f_code not in self._coverage.read:
            super().begins(frame)

    def reaches(self, code: types.CodeType, offset: int) -> None:
        pass


class _OfBackward(_OfLoss):
    """Listens to one of its backwards."""

    def begins(self, frame: types.FrameType) -> None:
        code = frame.f_code
        ran = self._coverage.found(code) is not None or any(r.code is code for r in self._found)
        if not ran:
            super().begins(frame)


def _called(frame: types.FrameType, hop: int) -> Called:
    code, known = frame.f_code, frame.f_locals
    cells = [types.CellType(known[n]) if n in known else types.CellType() for n in code.co_freevars]
    function = types.FunctionType(code, frame.f_globals, code.co_name, None, tuple(cells))
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = {n: known[n] for n in names if n in known and not isinstance(known[n], Tensor)}
    return Called(function, given, hop)


def _is_by_chance(frame: types.FrameType) -> bool:
    """Return whether a function begins that is called at the end of an object, when it may be
    chance, and which no recording has, as that keeps the objects of before; or one that a compiler
    has made, or looks into."""
    around: types.FrameType | None = frame
    while around is not None:
        if is_compilers(around):
            return True
        around = around.f_back
    if frame.f_code.co_name == "__del__":
        return True
    around = frame.f_back
    if around is not None and around.f_globals.get("__name__") == weakref.__name__:
        return True
    given = [*frame.f_locals.values()]
    given += [one for several in given if type(several) is tuple for one in several]
    return any(isinstance(one, weakref.ref) and one() is None for one in given)
