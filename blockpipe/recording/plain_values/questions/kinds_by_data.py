"""Whether the kind of a value follows from the data: whether it is ``None``, which object it is, of
which class or dtype, with how many dims.

Most data leave kinds as they are. But a function may find something in some data, and return
``None`` for others; a branch may make a tensor another dtype.
"""

from __future__ import annotations

import ast
import enum
import itertools
import types
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from ..evaluation.callers import argument_of, call_of
from ..evaluation.expressions import Frame
from ..evaluation.members import UNKNOWN, attribute_in
from ..evaluation.still_frames import Given
from ..known_values import KnownValues
from ..still_code import frame_inside
from ..syntax.accesses import contexts_of, returned_by, tests_of
from ..syntax.deciders import fills, written_sources
from ..syntax.effects import ASKS_KIND, COMPUTES, arguments_of, name_called
from .set_by_forwards import is_set, is_users_function, users_function

_CHOOSES = ("min", "max", "next", "sum")  # what is returned follows from the values
_SURE = (nn.Module, type, types.ModuleType, types.FunctionType)
_NUMBERS = (int, float, complex)
_MOST_LOOKS = 200  # for one question: a guess


class AskedValues(Protocol):
    """Questions to the values of expressions."""

    def is_open(self, questions: Iterable[ast.AST], frame: Frame) -> bool:
        """Return whether any condition may have another answer for another micro-batch."""

    def value_may_differ(self, node: ast.AST, frame: Frame) -> bool:
        """Return whether an expression may have another value, also if that is a tensor."""


class Kinds:
    """Questions to the kinds of what the expressions of a forward give.

    Args:
        known: what the forward sets.
        values: questions to their values.
    """

    def __init__(self, known: KnownValues, values: AskedValues) -> None:
        self._known, self._values = known, values
        self._found = dict[Any, bool]()
        self._kept: list[Any] = []  # so that no other frame gets the id of one

    def may_differ(self, node: ast.AST | None, frame: Frame) -> bool:
        """Return whether what an expression gives may be of another kind, or another object, for
        another micro-batch of the same sizes."""
        key = node, id(frame.frame)
        if key not in self._found:
            if len(self._found) > _MOST_LOOKS:
                return False
            self._found[key] = False  # of itself
            self._kept.append(frame)
            self._found[key] = self._may_differ(node, frame)
        return self._found[key]

    def of_tensor_may_differ(self, node: ast.expr, frame: Frame) -> bool:
        """Return the same of a tensor's dtype, and of whether it needs a gradient."""
        return self.may_differ(node, frame) or self.is_under_choice(frame)

    def is_under_choice(self, frame: Frame) -> bool:
        """Return whether a function enters a context that data may choose:
        ``torch.autocast("cuda", enabled=is_safe)``."""
        key = "contexts", id(frame.frame)
        if key not in self._found:
            self._found[key] = False  # of itself
            self._kept.append(frame)
            given = itertools.chain.from_iterable(map(arguments_of, contexts_of(frame.code)))
            self._found[key] = any(self._values.value_may_differ(one, frame) for one in given)
        return self._found[key]

    def is_one_of_several(self, node: ast.Name, frame: Frame) -> bool:
        """Return whether which of several expressions a local variable is set to may differ."""
        is_one = len(written_sources(frame.code, node.id)) < 2
        around = () if is_one else fills(frame.code, node.id)
        return self._values.is_open([one for one in around if isinstance(one, ast.expr)], frame)

    def has_several_results(self, call: ast.Call, frame: Frame) -> bool:
        """Return whether a function of the user's may return what another of its lines makes."""
        own = _users(call, frame)
        if own is None:
            return False
        if self._returns_may_differ(own, Given.by(call, frame)):
            return True
        returned = returned_by(_code_of(own))
        is_one = len(returned) == 1 and not isinstance(returned[0], ast.IfExp | ast.BoolOp)
        numbers = (one for one in arguments_of(call) if not is_tensor(one, frame))
        return not is_one and any(self._values.value_may_differ(one, frame) for one in numbers)

    def _may_differ(self, node: ast.AST | None, frame: Frame) -> bool:
        match node:
            case ast.Name():
                return self._name_may_differ(node, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                if self._values.is_open([test], frame):
                    return True
                now = frame.evaluated(test)
                may_be = (body, orelse) if now is UNKNOWN else (body if now else orelse,)
                return self._any(may_be, frame)
            case ast.BoolOp(values=values):
                return any(self._values.value_may_differ(one, frame) for one in values[:-1])
            case ast.BinOp(left=left, right=right):
                sides = (s for s in (left, right) if not isinstance(frame.evaluated(s), _NUMBERS))
                return self._any(sides, frame)
            case ast.Call():
                return self._result_may_differ(node, frame)
            case ast.Attribute(value=owner):
                return is_set(node, frame, self._known) or self.may_differ(owner, frame)
            case ast.Subscript(value=owner, slice=at):
                if isinstance(frame.evaluated(node), Tensor):
                    return self.may_differ(owner, frame)
                is_other = is_set(node, frame, self._known) or self.may_differ(owner, frame)
                return is_other or self._values.value_may_differ(at, frame)
            case ast.Compare() | ast.Lambda() | ast.Constant() | ast.JoinedStr() | None:
                return False
        return self._any(ast.iter_child_nodes(node), frame)

    def _any(self, nodes: Iterable[ast.AST], frame: Frame) -> bool:
        return any(self.may_differ(one, frame) for one in nodes)

    def _name_may_differ(self, node: ast.Name, frame: Frame) -> bool:
        if is_set(node, frame, self._known):
            return True
        if sources := written_sources(frame.code, node.id):
            return self.is_one_of_several(node, frame) or self._any(sources, frame)
        if (given := argument_of(node.id, frame)) is not None:
            return self.may_differ(*given)
        return _is_given_by_users(node, frame)

    def _result_may_differ(self, call: ast.Call, frame: Frame) -> bool:
        name, given, function = name_called(call), arguments_of(call), frame.bound(call.func)
        of_method = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        if _users(call, frame) is not None:
            return self._any(given, frame) or self.has_several_results(call, frame)
        if name in ASKS_KIND or (name in COMPUTES and name not in _CHOOSES and not of_method):
            return name == "type" and self._any(given, frame)
        if isinstance(function, type) and issubclass(function, enum.Enum):
            return any(self._values.value_may_differ(one, frame) for one in given)
        if isinstance(function, type) or _is_torchs(call.func, function, frame):
            return self._any((*of_method, *given), frame)
        if name == "getattr" and len(given) > 1 and isinstance(given[1], ast.Constant):
            asked = ast.Attribute(given[0], str(given[1].value), ast.Load())
            return self.may_differ(asked, frame) or self._any(given[2:], frame)
        if name == "get" and of_method and given:
            entry = ast.Subscript(of_method[0], given[0], ast.Load())
            if self.may_differ(entry, frame):
                return True
        if is_set(call, frame, self._known):  # it draws
            return True
        return any(self._values.value_may_differ(one, frame) for one in (*of_method, *given))

    def _returns_may_differ(self, function: Any, given: Given) -> bool:
        """Whether the user's function may return something of another kind."""
        code = _code_of(function)
        key = code, given.by_identity(), id(getattr(function, "__self__", None))
        if key in self._found:
            return self._found[key]
        self._found[key] = False  # of itself
        self._kept += [function, given]
        inner, returned = frame_inside(function, given), returned_by(code)
        tests = () if len(returned) == 1 else tests_of(code)
        found = self._values.is_open(tests, inner) or self._any(returned, inner)
        self._found[key] = found
        return found


def _is_given_by_users(node: ast.Name, frame: Frame) -> bool:
    """Return whether a variable is an argument from the user's code, of a call that nobody
    knows."""
    code, value = frame.code, frame.evaluated(node)
    if node.id not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    method = attribute_in(type(value), code.co_name)
    is_its_own = getattr(method, "__code__", None) is code
    return not is_its_own and not isinstance(value, _SURE) and call_of(frame) is not None


def _users(call: ast.Call, frame: Frame) -> Any:
    """Return the function of the user's that a call runs, of a module its forward."""
    called = frame.bound(call.func)
    if isinstance(called, nn.Module):
        forward = attribute_in(type(called), "forward")
        return types.MethodType(forward, called) if is_users_function(forward) else None
    return users_function(call, frame)


def _code_of(function: Any) -> types.CodeType:
    """Return the code of a function, or of a method."""
    code: types.CodeType = getattr(function, "__func__", function).__code__
    return code


def is_tensor(node: ast.expr, frame: Frame) -> bool:
    """Return whether an expression is known to be a tensor."""
    return isinstance(frame.evaluated(node), Tensor)


def _is_torchs(node: ast.expr, function: Any, frame: Frame) -> bool:
    """Whether a call's function is torch's, of which the kind of the result follows from the kinds
    of what it is given: a function, a method of a tensor, a layer."""
    if isinstance(function, nn.Module):
        return True
    home = getattr(function, "__module__", None) or getattr(function, "__qualname__", "")
    if function is not UNKNOWN and str(home).partition(".")[0] == "torch":
        return True
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):  # ``x.abs().max().item()``
        node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(frame.evaluated(node), Tensor):
            return True
    return False
