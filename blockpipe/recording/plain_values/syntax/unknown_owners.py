"""Reads of an attribute, or of an entry, of an object that nobody can tell without a run.

Such an object may still be one that outlives the forward, if its expression begins with one. What
is read of it is known by its name alone.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ....restoring.model_state import is_users
from .protocols import makers_of

_TENSORS = frozenset(dir(Tensor))  # of a tensor, most likely: names that say nothing
_NO_OWNERS = (
    *(bool, int, float, str, bytes, type(None), type, types.ModuleType, Tensor),
    *(types.BuiltinFunctionType, types.MethodType),
)


def name_read(node: ast.expr) -> str | None:
    """Return the name of an attribute, or the text that is the key of an entry."""
    if isinstance(node, ast.Attribute):
        return None if node.attr in _TENSORS else node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else None
    return None


_PICKERS = (types.BuiltinFunctionType, types.MethodDescriptorType)
_OF_PYTHON = ("builtins", "collections", "importlib", "inspect", "itertools", nn.Module.__module__)


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


def picks_out(node: ast.expr, evaluated: Callable[[ast.expr], Any]) -> bool:
    """Return whether an expression takes one of the objects that it goes through, by functions of
    Python and comprehensions alone: ``next(m for m in self.layers if m.is_last)``. What a module or
    another function of the user's returns may be made for this micro-batch.

    Args:
        node: the expression.
        evaluated: returns the value of an expression in it.
    """
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return isinstance(node, ast.Call | ast.Subscript) and all(
        _is_pythons(evaluated(function)) for function in calls
    )


def _is_pythons(function: Any) -> bool:
    if isinstance(function, types.FunctionType | type):
        return function.__module__ in _OF_PYTHON
    return isinstance(function, _PICKERS)


def _hands_out(function: Any) -> bool:
    """Whether a call of a user's function may return an object that was there before. A class whose
    ``__new__``, or whose own class, is the user's may have one such object for all."""
    if isinstance(function, types.FunctionType):
        return is_users(function.__module__)
    if not isinstance(function, type) or issubclass(function, tuple):
        return False
    return any(True for _ in makers_of(function))
