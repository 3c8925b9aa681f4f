"""Accesses to an attribute, or to an entry, of an object that nobody can tell without a run.

Such an object may still be one that outlives the forward, if its expression begins with one. What
is read of it is known by its name alone.
"""

from __future__ import annotations

import ast
import enum
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ...._common.libraries import is_users
from .accesses import Access
from .protocols import makers_of

_TENSORS = frozenset(dir(Tensor))  # of a tensor, most likely: names that say nothing
_METHODS = frozenset(name for kind in (str, bytes, list, dict, set, deque) for name in dir(kind))
_NO_OWNERS = (
    *(bool, int, float, str, bytes, type(None), type, types.ModuleType, Tensor),
    *(types.BuiltinFunctionType, types.MethodType),
)
_MOST_OBJECTS = 256  # of those that an object leads to: a guess
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_OF_MODULES = (nn.Module.__module__, nn.ModuleDict.__module__)


def asked_by_name(access: Access) -> tuple[ast.expr, str] | None:
    """Return the object and the name of an attribute that code reads or sets, or the text that is
    the key of an entry; ``None`` if it is no such access, or the name says nothing."""
    match access.node:
        case ast.Attribute(value=owner, attr=name):
            is_any = name in _TENSORS or (access.calls and name in _METHODS)
            return None if is_any else (owner, name)
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() as name)):
            return owner, name
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
            args=[owner, ast.Constant(value=str() as name), *_],
        ):
            return None if name in _TENSORS else (owner, name)
    return None


class Origins:
    """What a function's values come out of.

    Args:
        evaluated: returns the value of a name, and ``unknown`` if it is not known.
        unknown: stands for such a value.
        parameters: the names of the function's parameters.
        captures: the names that the function binds, with what their values come out of.
        is_inner: whether the function is written inside of another one, which hands it on: then its
            parameters may be anything.
    """

    def __init__(
        self,
        evaluated: Callable[[ast.expr], Any],
        unknown: object,
        parameters: Iterable[str],
        captures: Iterable[tuple[str, ast.expr]],
        *,
        is_inner: bool,
    ) -> None:
        self._evaluated, self._unknown = evaluated, unknown
        self._parameters, self._is_inner = frozenset(parameters), is_inner
        self._captures = [*captures]

    def may_last(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether an expression begins with what may be there before the call.

        Args:
            node: the expression.
            seen: the names that are being looked at.
        """
        parts = [*ast.walk(node)]
        names = [part.id for part in parts if isinstance(part, ast.Name) and part.id not in seen]
        calls = (part.func for part in parts if isinstance(part, ast.Call))
        return any(self._name_may_last(name, seen) for name in names) or any(
            _hands_out(self._evaluated(function)) for function in calls
        )

    def _name_may_last(self, name: str, seen: frozenset[str]) -> bool:
        value = self._evaluated(ast.Name(name))
        if value is not self._unknown:
            return not isinstance(value, _NO_OWNERS)
        if name in self._parameters:
            return self._is_inner
        out_of = [expression for known, expression in self._captures if known == name]
        return not out_of or any(self.may_last(one, seen | {name}) for one in out_of)


def begins_with_lasting(
    node: ast.expr,
    evaluated: Callable[[ast.expr], Any],
    unknown: object,
    is_lasting: Callable[[Any], bool],
) -> bool:
    """Return whether an expression in running code begins with what outlives the forward, or with
    what leads there.

    Args:
        node: the expression.
        evaluated: returns the value of a name, and ``unknown`` if it is not known.
        unknown: stands for such a value.
        is_lasting: returns whether an object outlives the forward.
    """
    parts = [*ast.walk(node)]
    own = {part.arg for part in parts if isinstance(part, ast.arg)}
    names = [part for part in parts if isinstance(part, ast.Name)]
    own |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    level = [evaluated(name) for name in names if name.id not in own]
    seen = dict[int, Any]()
    while level and len(seen) < _MOST_OBJECTS:
        value = level.pop()
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                return True
        elif isinstance(value, type | types.FunctionType):
            if is_users(value.__module__):
                return True
        elif value is unknown or is_lasting(value):
            return True
        elif id(value) not in seen and not isinstance(value, _NO_OWNERS):
            seen[id(value)] = value
            level += [one for one in gc.get_referents(value) if not isinstance(one, type)]
    return bool(level)


def is_made(node: ast.expr, evaluated: Callable[[ast.expr], Any]) -> bool:
    """Return whether an expression's value is made for this micro-batch, as far as its calls tell:
    a module, a tensor or a library makes it. Python's own functions, the methods that walk through
    modules, and the user's functions hand out what was there before as well: ``next(m for m in
    self.layers if m.is_last)``.

    Args:
        node: the expression.
        evaluated: returns the value of an expression in it.
    """
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(_makes(function, evaluated) for function in calls)


def _makes(node: ast.expr, evaluated: Callable[[ast.expr], Any]) -> bool:
    function = evaluated(node)
    if isinstance(node, ast.Attribute) and isinstance(evaluated(node.value), Tensor):
        return True
    kind = function if isinstance(function, _CODE) else type(function)
    module = kind.__module__ or ""
    is_pythons = module.partition(".")[0] in sys.stdlib_module_names or module in _OF_MODULES
    return isinstance(function, nn.Module) or not (is_pythons or is_users(module))


def _hands_out(function: Any) -> bool:
    """Whether a call of a user's function may return an object that was there before. A class whose
    ``__new__``, or whose own class, is the user's may have one such object for all."""
    if isinstance(function, types.FunctionType):
        return is_users(function.__module__)
    if isinstance(function, type) and issubclass(function, enum.Enum):
        return True  # ``Color("red")``
    if not isinstance(function, type) or issubclass(function, tuple):
        return False
    return any(True for _ in makers_of(function))
