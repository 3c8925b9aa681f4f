"""The values that expressions compute of plain values, such as ``i - 1`` and ``f"layer{i}"``.

These have no effect, so that they may be computed once more.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...._common.threads.thread_state import ours
from ...._torch.modules import children_of
from .contents import NOT_MADE, Evaluate

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MODULES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda member, container: member in container,
    ast.NotIn: lambda member, container: member not in container,
}
_FUNCTIONS = (abs, bool, float, format, hash, int, max, min, ord, repr, round, str, chr)
_OF_SHAPES: dict[str, Callable[..., Any]] = {
    "size": Tensor.size,
    "dim": Tensor.dim,
    "numel": Tensor.numel,
}
_CONVERSIONS: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}


def computed(node: ast.expr, evaluate: Evaluate) -> Any:
    """Return what an expression computes of plain values; ``NOT_MADE`` for others, and if it
    raises.

    Args:
        node: the expression.
        evaluate: evaluates the expressions in it.
    """
    try:
        return _computed(node, evaluate)
    except Exception:  # as the user's own will
        return NOT_MADE


def _computed(node: ast.expr, evaluate: Evaluate) -> Any:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            return _applied(_OPERATORS.get(type(op)), left, right, evaluate=evaluate)
        case ast.UnaryOp(op=op, operand=operand):
            return _applied(_OPERATORS[type(op)], operand, evaluate=evaluate)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared([left, *others], ops, evaluate)
        case ast.BoolOp(op=op, values=values):
            return _decided(values, isinstance(op, ast.Or), evaluate)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            asked = evaluate(test)
            return evaluate(body if asked else orelse) if _is_plain(asked) else NOT_MADE
        case ast.JoinedStr(values=parts):
            texts = [*map(evaluate, parts)]
            return "".join(texts) if all(type(text) is str for text in texts) else NOT_MADE
        case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
            found, how = evaluate(value), "" if spec is None else evaluate(spec)
            convert = _CONVERSIONS.get(conversion)
            is_known = _is_plain(found) and type(how) is str
            return format(convert(found) if convert else found, how) if is_known else NOT_MADE
        case ast.Subscript(value=value, slice=at) if type(text := evaluate(value)) is str:
            bounds = [at.lower, at.upper, at.step] if isinstance(at, ast.Slice) else [at]
            found = [None if one is None else evaluate(one) for one in bounds]
            is_known = all(map(_is_plain, found))
            return text[slice(*found) if len(found) > 1 else found[0]] if is_known else NOT_MADE
        case ast.Call(func=function, args=args, keywords=[]):
            return _of_call(function, args, evaluate)
    return NOT_MADE


def _compared(nodes: list[ast.expr], ops: list[ast.cmpop], evaluate: Evaluate) -> Any:
    for op, left, right in zip(ops, nodes, nodes[1:], strict=False):
        function = _OPERATORS[type(op)]
        if isinstance(op, ast.In | ast.NotIn):
            member, container = evaluate(left), evaluate(right)
            is_known = _is_plain(member) and type(container) in _CONTAINERS
            is_known = is_known and all(map(_is_plain, container))  # of a dictionary, the keys
            found = function(member, container) if is_known else NOT_MADE
        else:
            found = _applied(function, left, right, evaluate=evaluate)
        if found is NOT_MADE or not found:
            return found
    return True


def _decided(nodes: list[ast.expr], is_or: bool, evaluate: Evaluate) -> Any:
    """Return what ``a or b`` or ``a and b`` gives."""
    for node in nodes[:-1]:
        found = evaluate(node)
        if not _is_plain(found) and type(found) not in _CONTAINERS:
            return NOT_MADE
        if bool(found) is is_or:
            return found
    return evaluate(nodes[-1])


def _of_call(node: ast.expr, args: list[ast.expr], evaluate: Evaluate) -> Any:
    if isinstance(node, ast.Attribute):
        owner = evaluate(node.value)
        if isinstance(owner, Tensor) and node.attr in _OF_SHAPES:
            with ours():  # no mode is asked
                return _OF_SHAPES[node.attr](owner, *map(evaluate, args))
        method = getattr(str, node.attr, None) if type(owner) is str else None
        return _applied(method, node.value, *args, evaluate=evaluate)
    function = evaluate(node)
    if function is len and args:
        found = evaluate(args[0])
        if isinstance(found, Tensor):
            with ours():
                return found.shape[0] if found.dim() else NOT_MADE
        found = children_of(found) if isinstance(found, _MODULES) else found
        return len(found) if type(found) in (str, torch.Size, *_CONTAINERS) else NOT_MADE
    is_pure = any(function is one for one in _FUNCTIONS)
    return _applied(function if is_pure else None, *args, evaluate=evaluate)


def _applied(function: Callable[..., Any] | None, *nodes: ast.expr, evaluate: Evaluate) -> Any:
    values = [] if function is None else [*map(evaluate, nodes)]
    return function(*values) if function is not None and all(map(_is_plain, values)) else NOT_MADE


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_plain, value))
    # A number that remembers what it is asked says that it is an int.
    return value.__class__ in _PLAIN
