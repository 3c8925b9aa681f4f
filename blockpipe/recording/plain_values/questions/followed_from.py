"""What the value of an expression follows from: the places that it, and what leads to it, reads.

A forward that sets the same value twice may set another one the third time, if the value follows
from a count: ``self.alpha = 0.5 * (1 + self.calls // 6)``. What forwards count is known when they
are over.
"""

import ast
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..evaluation.callers import argument_of
from ..evaluation.expressions import Frame
from ..evaluation.members import ALL
from ..evaluation.still_frames import Given
from ..still_code import frames_of
from ..syntax.accesses import Access, sources_of
from ..syntax.deciders import fills
from ..syntax.effects import arguments_of
from .set_by_forwards import reads_in, users_function

_MOST = 64  # expressions that are followed: a guess

Place = tuple[Any, Any]  # an object, and a name or key in it; ``ALL``: its content


class Behind(NamedTuple):
    """What it follows from that an instruction sets: places, with an object and a key in it each.

    Attributes:
        value: of the value.
        key: of the key that it sets it for.
    """

    value: Sequence[Place] = ()
    key: Sequence[Place] = ()


def behind_write(access: Access, frame: Frame) -> Behind:
    """Return what it follows from that an access of a running frame sets."""
    node, said = access.node, [] if access.assigned is None else [access.assigned]
    said = said or (arguments_of(node) if isinstance(node, ast.Call) else [])
    keys = [node.slice] if isinstance(node, ast.Subscript) else []
    return Behind(followed_from(said, frame), followed_from(keys, frame))


def followed_from(expressions: Iterable[ast.expr], frame: Frame) -> list[Place]:
    """Return the places that some expressions read, and what leads to their variables.

    Args:
        expressions: what a value is set to, or the key that it is set for.
        frame: the running frame that they are in.
    """
    todo: list[tuple[ast.AST, Frame]] = [(one, frame) for one in expressions]
    found, seen = list[Place](), set[Any]()
    while todo and len(seen) < _MOST:
        expression, around = todo.pop()
        for part in ast.walk(expression):
            if isinstance(part, ast.Name | ast.Attribute | ast.Subscript):
                owner, key, value = _owner_of(Access(part, reads=True, writes=False), around)
                found += [] if owner is None else [(owner, key)]
                found += [] if value is None or isinstance(value, Tensor) else [(value, ALL)]
                if owner is None and isinstance(part, ast.Name):
                    key = part.id, id(around.frame)
                    todo += [] if key in seen else _behind(part, around)
                    seen.add(key)
            elif isinstance(part, ast.Call):
                found += _read_by(part, around)
    return found


def _behind(name: ast.Name, frame: Frame) -> Iterator[tuple[ast.AST, Frame]]:
    """Yield what a local variable is set to, or filled with, or the caller's argument."""
    if isinstance(frame.evaluated(name), Tensor):
        return
    sources = [*sources_of(frame.code, name.id), *fills(frame.code, name.id)]
    yield from ((one, frame) for one in sources)
    given = None if sources else argument_of(name.id, frame)
    if given is not None and given[0] is not None:
        yield given[0], given[1]


def _read_by(call: ast.Call, frame: Frame) -> Iterator[Place]:
    """Yield the places that a function of the user's reads."""
    function = users_function(call, frame)
    if function is None:
        return
    for still in frames_of(function, Given.by(call, frame)):
        for access, inner in reads_in(still):
            owner, key, value = _owner_of(access, inner)
            yield from () if owner is None else ((owner, key),)
            yield from () if value is None else ((value, ALL),)


def _owner_of(access: Access, frame: Frame) -> tuple[Any, Any, Any]:
    with contextlib.suppress(Exception):  # of an object that cannot be looked at
        return frame.owner_of(access)
    return None, None, None
