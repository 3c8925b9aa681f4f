"""The values that expressions make of containers: displays, slices, and methods that take one out.

They are found without running any code but that of Python's own containers, and the containers stay
as they are: ``pop`` gives what it would take.
"""

import ast
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ...._torch.modules import children_of

_PLAIN = (list, tuple, deque, set, frozenset, dict, OrderedDict, defaultdict)
_DICTS = (dict, OrderedDict, defaultdict)
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
_OF_FIELDS = ("_asdict", "_replace")  # methods of a named tuple
_LISTS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "list": list,
    "tuple": list,
    "iter": list,
    "reversed": lambda members: members[::-1],
    "sorted": sorted,
}
_MOST_MEMBERS = 256  # of a container that is looked into: a guess
NOT_MADE: Any = object()  # an expression makes nothing of a container, as far as is known

Evaluate = Callable[[ast.expr], Any]


def made_of(node: ast.expr, evaluate: Evaluate) -> Any:
    """Return the value of an expression that makes something of a container; ``NOT_MADE`` for
    others.

    Args:
        node: the expression.
        evaluate: evaluates the expressions in it.
    """
    match node:
        case ast.NamedExpr():
            return evaluate(node.value)
        case ast.BinOp(left=left, op=op, right=right):
            return _joined(evaluate(left), evaluate(right), op)
        case ast.List():
            return _displayed(node.elts, evaluate)
        case ast.Tuple():
            found = _displayed(node.elts, evaluate)
            return found if found is NOT_MADE else tuple(found)
        case ast.Dict():
            return _dict_of(node, evaluate)
        case ast.Subscript(value=value, slice=ast.Slice(lower=start, upper=stop, step=step)):
            bounds = [None if one is None else evaluate(one) for one in (start, stop, step)]
            return _sliced(evaluate(value), bounds)
        case ast.Call(func=ast.Name(id=name), args=[first, *_], keywords=[]):
            return _by_function(name, _listed(evaluate(first)))
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
            return _by_method(evaluate(value), name, [*map(evaluate, args)])
    return NOT_MADE


def _sliced(owner: Any, bounds: list[Any]) -> Any:
    """Return the members that a slice gives, or all, if its bounds are not known."""
    owner = _listed(owner)
    if type(owner) not in (list, tuple, torch.Size) or len(owner) > _MOST_MEMBERS:
        return NOT_MADE
    is_known = all(bound is None or type(bound) is int for bound in bounds) and bounds[2] != 0
    return owner[slice(*bounds)] if is_known else [*owner]


def _by_function(name: str, found: Any) -> Any:
    """Return what a function of Python's makes of a container. What it sorts has to be texts or
    numbers: an order of objects only their own code tells."""
    if not _is_looked_into(found):
        return NOT_MADE
    is_sorted = name != "sorted" or all(isinstance(one, str | int | float) for one in found)
    if name == "next":
        return next(iter(found), NOT_MADE)
    return _LISTS[name]([*found]) if name in _LISTS and is_sorted else NOT_MADE


def _by_method(owner: Any, name: str, args: list[Any]) -> Any:
    if isinstance(owner, tuple) and name in _OF_FIELDS and hasattr(owner, "_fields"):
        return dict(zip(owner._fields, owner, strict=True)) if name == "_asdict" else owner
    if isinstance(owner, ContextVar):
        try:
            return owner.get(*args[:1]) if name == "get" else NOT_MADE
        except LookupError:  # as in the user's own call
            return NOT_MADE
    if not _is_looked_into(owner, name):
        return NOT_MADE
    if isinstance(owner, dict):
        if name in ("keys", "values", "items"):
            return [*getattr(dict, name)(owner)]
        is_asked = name in ("get", "pop", "setdefault", "__getitem__")
        if is_asked and args and isinstance(args[0], str | int):
            return dict.get(owner, args[0], args[1] if len(args) > 1 else None)
        if name == "popitem" and owner:
            return next(reversed(owner.items()))
    elif name in ("pop", "popleft", "__getitem__") and isinstance(owner, list | tuple | deque):
        at = args[0] if args and isinstance(args[0], int) else -1 if name == "pop" else 0
        return owner[at] if -len(owner) <= at < len(owner) else NOT_MADE
    return owner if name == "copy" else NOT_MADE


def _joined(left: Any, right: Any, op: ast.operator) -> Any:
    """Return the container that ``+`` or ``|`` makes of two."""
    if _is_looked_into(left) and _is_looked_into(right) and type(left) is type(right):
        if isinstance(op, ast.Add) and type(left) in (list, tuple, deque):
            return [*left, *right]
        if isinstance(op, ast.BitOr) and type(left) in _DICTS:
            return {**left, **right}
    return NOT_MADE


def _displayed(nodes: list[ast.expr], evaluate: Evaluate) -> Any:
    members: list[Any] = []
    for node in nodes:
        if not isinstance(node, ast.Starred):
            members.append(evaluate(node))
        elif _is_looked_into(found := _listed(evaluate(node.value))):
            members += found
        else:
            return NOT_MADE  # nobody knows where the others are
    return members


def _dict_of(node: ast.Dict, evaluate: Evaluate) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        found = evaluate(value)
        if key is None and isinstance(found, dict) and _is_looked_into(found):
            made.update(found)
        elif isinstance(key, ast.Constant):
            made[key.value] = found
    return made


def _listed(value: Any) -> Any:
    """Return a list of modules as a list of Python's, and all else as it is."""
    is_list = isinstance(value, nn.ModuleList | nn.Sequential)
    return [*children_of(value).values()] if is_list else value


def _is_looked_into(value: Any, *names: str) -> bool:
    """Return whether a value is a container that no code of the user's walks through, nor has such
    methods."""
    if not isinstance(value, _PLAIN) or not all(
        isinstance(getattr(type(value), name, None), _IN_C)
        for name in ("__iter__", "__len__", *names)
    ):
        return False
    return len(value) <= _MOST_MEMBERS


def alternatives(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions whose value an expression may have: ``a`` and ``b`` of ``a or b``, and
    of ``a if c else b``."""
    match node:
        case ast.IfExp():
            yield from itertools.chain(alternatives(node.body), alternatives(node.orelse))
        case ast.BoolOp():
            yield from itertools.chain.from_iterable(map(alternatives, node.values))
        case ast.NamedExpr():
            yield from alternatives(node.value)
        case _:
            yield node
