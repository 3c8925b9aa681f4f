"""What an expression may be instead, for other data than the recorded ones."""

import ast
import dis
import itertools
import types
from collections.abc import Iterable

from ..syntax.accesses import tests_of
from ..syntax.effects import ASKS_SHAPE, name_called
from .expressions import Frame


def may_be_constant(value: ast.expr | None, frame: Frame, *, fake: bool) -> bool:
    """Return whether an expression is a constant, such as ``None``, or may be one for other data:
    ``None if keep.all() else keep``, and a call of a function that returns either.

    Args:
        value: the expression; ``None``: it is not known.
        frame: the frame that it is in.
        fake: whether the forward runs on fake tensors; then it reads no data.
    """
    if fake or value is None or isinstance(value, ast.Constant):
        return isinstance(value, ast.Constant)
    if isinstance(value, ast.IfExp):
        branches = value.body, value.orelse
        return any(isinstance(one, ast.Constant) for one in branches) and _asks_data([value.test])
    code = None
    if isinstance(value, ast.Call):
        code = getattr(frame.evaluated(value.func), "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    return _may_return_constant(code) and _asks_data(tests_of(code))


def _asks_data(tests: Iterable[ast.AST]) -> bool:
    nodes = [node for test in tests for node in ast.walk(test)]
    calls = {name_called(node) for node in nodes if isinstance(node, ast.Call)}
    return not calls <= {*ASKS_SHAPE} or any(
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and not isinstance(node.ops[0], ast.Is | ast.IsNot)
        for node in nodes
    )


def _may_return_constant(code: types.CodeType) -> bool:
    instructions = [*dis.get_instructions(code)]
    returns = {each.offset for each in instructions if each.opname == "RETURN_VALUE"}
    for each, following in itertools.pairwise(instructions):
        leads = following.argval if following.opname == "JUMP_FORWARD" else following.offset
        if each.opname == "LOAD_CONST" and leads in returns:
            return True
    return any(each.opname == "RETURN_CONST" for each in instructions)
