"""Which questions of the user's code may have another answer for another micro-batch."""

import ast
import contextlib
import itertools
import types
from collections.abc import Iterable, Iterator

from torch import Tensor

from ..._common.libraries import has_users_code
from .evaluation.expressions import Frame
from .evaluation.members import ALL
from .evaluation.sizes import argument_of
from .known_values import KnownValues
from .still_code import frames_of
from .syntax.accesses import Access, accesses_of, sources_of
from .syntax.effects import ASKS_CHANCE, ASKS_SHAPE, asked_for_values, name_called


def any_open(
    questions: Iterable[ast.AST], frame: Frame, known: KnownValues, *, calls: bool = True
) -> bool:
    """Return whether any expression may have another value for another micro-batch: by the data, or
    by what forwards set (``self.calls % 5 == 0``), also if a local variable has it.

    Args:
        questions: the expressions.
        frame: the frame that they are in.
        known: what the forward sets.
        calls: whether in a real run each call that asks for more than shapes counts.
    """
    asked = [*questions]
    if not known.fake and any(_is_tensor(name, frame) for name in asked_for_values(asked)):
        return True
    nodes = (node for one in asked for node in ast.walk(one))
    if any(_is_open(node, frame, known, calls=calls) for node in nodes):
        return True
    return any(_is_set(node, frame, known) for node in _behind(asked, frame))


def _is_open(node: ast.AST, frame: Frame, known: KnownValues, *, calls: bool) -> bool:
    if isinstance(node, ast.Call) and calls and not known.fake:
        return name_called(node) not in ASKS_SHAPE
    if isinstance(node, ast.Name) and not known.fake:
        owner, _, value = frame.owner_of(Access(node, reads=True, writes=False))
        if owner is None and isinstance(value, bool | int | float):
            return _is_given_openly(node, frame, known)
    return _is_set(node, frame, known)


def _is_given_openly(name: ast.Name, frame: Frame, known: KnownValues) -> bool:
    """Whether a number may be another one for another micro-batch: but not as an argument that the
    caller leaves out, or gives as a constant or another value that is not open."""
    if (given := argument_of(name.id, frame)) is None:
        return True
    value, caller = given
    return value is not None and any_open([value], caller, known)


def _is_set(node: ast.AST, frame: Frame, known: KnownValues) -> bool:
    """Whether an expression is a value that forwards set, or a call that draws, or that asks for
    such a value."""
    if isinstance(node, ast.Call):
        return name_called(node) in ASKS_CHANCE or _asks_for_set(node, frame, known)
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return False
    return _sets(Access(node, reads=True, writes=False), frame, known)


def _asks_for_set(call: ast.Call, frame: Frame, known: KnownValues) -> bool:
    """Whether a function of the user's reads a value that forwards set."""
    function = frame.bound(call.func)
    behind = getattr(function, "__func__", function)
    if not isinstance(behind, types.FunctionType) or not has_users_code(behind):
        return False
    for still in frames_of(function):
        inner = Frame(still, {}, None)  # type: ignore[arg-type]
        for accesses in accesses_of(still.f_code).values():
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                if any(access.reads and _sets(access, inner, known) for access in accesses):
                    return True
    return False


def _sets(access: Access, frame: Frame, known: KnownValues) -> bool:
    """Whether forwards set the value that an access reads, or change its content."""
    owner, key, value = frame.owner_of(access)
    found = (known.found_at(owner, key), known.found_at(value, ALL))
    return any(one is not None and (one.set_on or one.counted_on) for one in found)


def _behind(questions: Iterable[ast.AST], frame: Frame) -> Iterator[ast.AST]:
    """Yield the parts of what the local variables in expressions are set to, and so on. That one is
    ``None``, or a certain object, says nothing of a count."""
    todo, seen = [*itertools.chain.from_iterable(map(_but_identity, questions))], set[str]()
    while todo:
        for part in ast.walk(todo.pop()):
            if isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                sources = sources_of(frame.code, part.id)
                todo += sources
                yield from (inner for one in sources for inner in ast.walk(one))


def _but_identity(question: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a condition that ask for more than which object it is."""
    if isinstance(question, ast.BoolOp | ast.UnaryOp):
        for part in ast.iter_child_nodes(question):
            yield from _but_identity(part)
    elif not (
        isinstance(question, ast.Compare) and isinstance(question.ops[0], ast.Is | ast.IsNot)
    ):
        yield question


def _is_tensor(name: ast.Name, frame: Frame) -> bool:
    return isinstance(frame.evaluated(name), Tensor)
