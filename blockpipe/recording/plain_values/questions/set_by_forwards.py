"""Which expressions have a value that forwards set: from one to the next, it may be another one."""

import ast
import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...._common.libraries import has_users_code
from ..evaluation.expressions import Frame
from ..evaluation.members import ALL, attribute_in
from ..evaluation.still_frames import Given, StillFrame
from ..known_values import KnownValues
from ..places import space_of
from ..still_code import frames_of
from ..syntax.accesses import Access, accesses_of, calls_of
from ..syntax.effects import ASKS_CHANCE, name_called
from ..syntax.uses import Use


def users_function(call: ast.Call, frame: Frame) -> Any:
    """Return the function of the user's that a call calls; ``None`` if it is no such one."""
    function = frame.bound(call.func)
    called = attribute_in(type(function), "__call__")  # of an object
    if isinstance(called, types.FunctionType) and not isinstance(function, nn.Module):
        function = types.MethodType(called, function)
    return function if is_users_function(getattr(function, "__func__", function)) else None


def is_users_function(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and has_users_code(function)


def is_set(node: ast.AST, frame: Frame, known: KnownValues) -> bool:
    """Whether an expression is a value that forwards set, or a call that draws, or that asks for
    such a value."""
    if isinstance(node, ast.Call):
        return name_called(node) in ASKS_CHANCE or _asks_for_set(node, frame, known)
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return False
    return _sets(Access(node, reads=True, writes=False), frame, known)


def _asks_for_set(call: ast.Call, frame: Frame, known: KnownValues) -> bool:
    """Whether a function of the user's reads a value that forwards set, or draws."""
    function = users_function(call, frame)
    if function is None:
        return False
    for still in frames_of(function, Given.by(call, frame)):
        if any(name_called(one) in ASKS_CHANCE for one in calls_of(still.f_code)):
            return True
        for access, inner in reads_in(still):
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                if _sets(access, inner, known):
                    return True
    return False


def reads_in(still: StillFrame) -> Iterator[tuple[Access, Frame]]:
    """Yield what a function reads that does not run, each with the frame to evaluate it in."""
    inner = Frame(still, {}, None)  # type: ignore[arg-type]
    for accesses in accesses_of(still.f_code).values():
        yield from ((one, inner) for one in accesses if one.reads and one.use is not Use.WRITE)


def _sets(access: Access, frame: Frame, known: KnownValues) -> bool:
    """Whether forwards set the value that an access reads, or change its content."""
    owner, key, value = frame.owner_of(access)
    places = (space_of(owner), key), (space_of(value), ALL)
    found = [known.asked.is_open(where) for where in places]  # each is noted
    return any(found)


def is_kept(node: ast.AST, frame: Frame) -> bool:
    """Whether a tensor is kept from one forward to the next, which may write to it, and whose value
    a fake run knows as well: a count in a buffer."""
    is_attribute = isinstance(node, ast.Attribute | ast.Subscript)
    return is_attribute and not isinstance(frame.evaluated(node), nn.Parameter)  # type: ignore[arg-type]
