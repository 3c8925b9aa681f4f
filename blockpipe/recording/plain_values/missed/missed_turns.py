"""Loops over what was found in the data, and errors that are caught: what code these may run."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...._common.libraries import is_users
from ..evaluation.expressions import Frame
from ..evaluation.still_frames import STOPS, Given
from ..known_values import KnownValues
from ..questions.open_questions import any_open, follows_from_set
from ..questions.set_by_forwards import users_function
from ..still_code import frames_of
from ..syntax.accesses import Access, branches_of, conditions_of, sources_of
from ..syntax.branches import Turn
from ..syntax.effects import ASKS_SHAPE, name_called

# A recording finds the same ones of these, whatever the data.
_OF_NO_DATA = (
    *(ImportError, AttributeError, NameError, TypeError, NotImplementedError, OSError),
    *(StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit),
)
_OF_TENSORS = frozenset(["shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn"])
_MAY_FAIL = frozenset(  # by the values of a matrix, also where a recording has none
    [
        *("cholesky", "cholesky_inverse", "inv", "inverse", "solve", "lstsq", "svd", "svdvals"),
        *("eig", "eigh", "eigvals", "eigvalsh", "tensorinv", "tensorsolve"),
    ]
)
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_RAISES = "RAISE_VARARGS"  # by ``raise``
_YIELDS = "YIELD_VALUE"  # also by ``yield from`` and ``await``

_Accesses = Mapping[int, list[Access]]


class MissedTurns:
    """The turns of loops, and the handlers of errors, that a forward did not take.

    Args:
        known: the values that the forward has read and set.
        fake: whether the forward runs on fake tensors; then it reads no data.
    """

    def __init__(self, known: KnownValues, *, fake: bool) -> None:
        self._known, self._fake = known, fake
        self._raised: dict[int, type[BaseException]] = {}  # the latest, by the id of a frame

    def raises(self, running: types.FrameType, kind: type[BaseException]) -> None:
        """An error is raised in a frame, or comes out of what it has called."""
        self._raised[id(running)] = kind

    def take_raised(self, running: types.FrameType) -> type[BaseException] | None:
        """Return the latest error in a frame that is over, and forget it."""
        return self._raised.pop(id(running), None)

    def is_over(self, running: types.FrameType) -> bool:
        """Return whether a frame that gives something back does not go on, as a generator's may."""
        is_closed = self._raised.get(id(running)) is GeneratorExit
        return is_closed or not running.f_code.co_flags & STOPS or _instruction(running) != _YIELDS

    def opened(
        self,
        running: types.FrameType,
        accesses: _Accesses,
        ran: Container[int],
        frame: Frame,
        raised: type[BaseException] | None,
    ) -> set[int]:
        """Return the instructions that loops, or errors that are caught, may run by the data.

        Args:
            running: the frame of a function, at its end.
            accesses: all accesses of its code.
            ran: the instructions among these that have run.
            frame: the same frame, to evaluate in.
            raised: what :meth:`take_raised` has returned for it.
        """
        is_left = raised is not None and _is_left(running)
        if is_left and not self._fake and self._may_raise([raised]):
            return {*accesses}
        opened = set[int]()
        for turn in branches_of(running.f_code):
            body = {at for at, found in accesses.items() if turn.has(found[0].node)}
            caught = {at for at, found in accesses.items() if turn.handles(found[0].node)}
            has_begun = any(at in ran for at in body)
            if turn.is_loop:
                opened |= set() if has_begun or not self._is_found(turn, frame) else body
            elif self._fails(turn, frame):
                has_failed = any(at in ran for at in caught) or not turn.handlers
                opened |= body | caught if has_failed else caught
        return opened

    @staticmethod
    def within(code: types.CodeType, accesses: _Accesses, ran: Container[int]) -> set[int]:
        """Return the instructions in loops that have not turned, in handlers of errors, and behind
        a line that has raised one."""
        found = set[int]()
        nodes = {at: several[0].node for at, several in accesses.items()}
        for turn in branches_of(code):
            inside = turn.has if turn.is_loop else turn.handles
            body = {at for at, node in nodes.items() if inside(node)}
            found |= body if not any(at in ran for at in body) else set()
            if not turn.is_loop:
                tests = [one for one in conditions_of(code) if turn.has(one.test)]
                found |= {
                    at
                    for at, node in nodes.items()
                    if turn.has(node) and all(one.asked_for(node) is None for one in tests)
                }
        return found

    def _is_found(self, turn: Turn, frame: Frame) -> bool:
        """Whether it follows from the data how often a loop turns. What a comprehension runs over,
        the code around it evaluates."""
        over, around = turn.by, frame.frame.f_back if frame.is_running else None
        if frame.code.co_name in _COMPREHENSIONS and around is not None:
            frame = Frame(around, {}, None)
        if any_open(over, frame, self._known, calls=False):
            return True
        sources = [
            s for one in over if isinstance(one, ast.Name) for s in sources_of(frame.code, one.id)
        ]
        return not self._fake and any(_has_data(one, frame) for one in (*over, *sources))

    def _fails(self, turn: Turn, frame: Frame) -> bool:
        """Whether it follows from the data, or from what forwards set, if statements raise an error
        that is caught."""
        kinds = [frame.evaluated(kind) for kind in turn.caught]
        if kinds and not self._may_raise(kinds) and not _raise(turn.by, frame):
            return False
        parts = [part for node in turn.by for part in ast.walk(node)]
        of_matrices = torch.linalg.LinAlgError  # type: ignore[attr-defined]
        if of_matrices in kinds or any(name_called(part) in _MAY_FAIL for part in parts):
            return True
        if follows_from_set(turn.by, frame, self._known):
            return True
        return not self._fake and any(_has_data(node, frame) for node in turn.by)

    @staticmethod
    def _may_raise(kinds: Iterable[Any]) -> bool:
        """Whether any error of some kinds may follow from the data."""
        flat = (one for kind in kinds for one in (kind if isinstance(kind, tuple) else (kind,)))
        return any(
            not (isinstance(k, type) and issubclass(k, _OF_NO_DATA)) or is_users(k.__module__)
            for k in flat
        )


def _raise(statements: Iterable[ast.AST], frame: Frame) -> bool:
    """Return whether statements raise an error by themselves, or in functions of the user's."""
    parts = [part for one in statements for part in ast.walk(one)]
    if any(isinstance(part, ast.Raise) for part in parts):
        return True
    calls = [part for part in parts if isinstance(part, ast.Call)]
    called = ((users_function(call, frame), Given.by(call, frame)) for call in calls)
    stills = (still for function, given in called for still in frames_of(function, given))
    return any(_RAISES in map(dis.opname.__getitem__, s.f_code.co_code[::2]) for s in stills)


def _is_left(running: types.FrameType) -> bool:
    """Whether an error ends a function, and not its last statement."""
    return not _instruction(running).startswith("RETURN")


def _instruction(running: types.FrameType) -> str:
    """Return the name of the instruction that a frame is at."""
    return dis.opname[running.f_code.co_code[running.f_lasti]]


def _has_data(node: ast.AST, frame: Frame) -> bool:
    """Return whether code asks for more of a tensor than what it is, or uses a number of which
    nobody knows whether it follows from one."""
    if isinstance(node, ast.Attribute) and node.attr in _OF_TENSORS:
        return False
    if isinstance(node, ast.Call) and name_called(node) in ASKS_SHAPE:
        return False
    if isinstance(node, ast.Name | ast.Attribute):
        value = frame.evaluated(node)
        is_number = isinstance(node, ast.Name) and isinstance(value, int | float)
        if is_number or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
            return True
    return any(_has_data(child, frame) for child in ast.iter_child_nodes(node))
