"""Find updates of a value that another thread may lose: ``state.total += h.sum().item()``.

Python reads the old value first, and sets the new one last. If it calls something in between,
another thread may set the value meanwhile, and that is lost. In ``state.n += 1`` it calls nothing:
the interpreter asks whether other threads wait when a function is called or a loop goes on, and
nowhere else. To set an attribute of a module calls ``Module.__setattr__``, which is written in
Python: of two threads that did nothing but ``module.n += 1``, four in ten updates were lost. The
source decides that, and no run could: that a thread came in between is chance.
"""

import ast
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._common.libraries import is_users
from .evaluation.expressions import Frame
from .evaluation.members import attribute_in
from .syntax.accesses import Access
from .syntax.effects import name_called

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_IN_PLACE = (list, set, dict, deque, bytearray)
_RUNS_CODE = (ast.Await, ast.Yield, ast.YieldFrom, ast.ListComp, ast.SetComp, ast.DictComp)


def read_how(access: Access, frame: Frame, is_lasting: Callable[[Any], bool]) -> dict[str, bool]:
    """Return how an access reads a value: only to update it, so that what others set may be lost,
    or to put it as it is into what outlives the forward, or into a hook's default.

    Args:
        access: the access that reads the value.
        frame: the frame that it is in.
        is_lasting: says whether an object outlives the forward.
    """
    kept = None if access.stored_in is None else frame.evaluated(access.stored_in)
    stores = kept is not None and (isinstance(kept, Tensor) or is_lasting(kept))
    how = {"counts": access.counts, "loses": may_lose(access, frame), "stores": stores}
    return how | {"ordered": is_ordered(access)}


def is_ordered(access: Access) -> bool:
    """Return whether a value that goes back to its place depends on the order of its updates:
    ``0.9 * n + 0.1 * x`` does, ``n + x`` and ``max(n, x)`` do not."""
    whole, own = access.goes_back_by, ast.dump(access.node).replace("Store()", "Load()")
    if whole is None or any(map(_is_clock, ast.walk(whole))):
        return False
    its_own = {id(p) for n in ast.walk(whole) if _is(n, own) for p in ast.walk(n)}
    beside = (part for part in ast.walk(whole) if id(part) not in its_own)
    if not any(isinstance(part, ast.Name | ast.Call) for part in beside):
        return False  # each of them is the same
    kinds = {_kind(node) for node in ast.walk(whole) if _holds(node, own)} - {None}
    is_augmented = isinstance(getattr(access.node, "ctx", None), ast.Store)
    return len(kinds) > 1 or (bool(kinds) and is_augmented) or ast.operator in kinds


def _holds(node: ast.AST, own: str) -> bool:
    """Whether an expression has the value in it."""
    return any(_is(part, own) for part in ast.walk(node))


def _is(node: ast.AST, own: str) -> bool:
    return isinstance(node, ast.expr) and ast.dump(node) == own


def _kind(node: ast.AST) -> type[ast.operator] | None:
    """Return one operator for all of those that may follow each other in any order; the class of
    all of them for those that may not; ``None``: it is no operator."""
    if not isinstance(node, ast.BinOp):
        return None
    alike: dict[type[ast.operator], type[ast.operator]] = {
        **dict.fromkeys((ast.Add, ast.Sub), ast.Add),
        **dict.fromkeys((ast.Mult, ast.Div), ast.Mult),
        **{one: one for one in (ast.BitOr, ast.BitAnd, ast.BitXor)},
    }
    return alike.get(type(node.op), ast.operator)


def may_lose(access: Access, frame: Frame) -> bool:
    """Return whether what other threads set may be lost, where a value goes back to its place. Of
    clocks, nobody expects the plain loop's times.

    Args:
        access: the access that reads the value.
        frame: the frame that it is in.
    """
    if access.goes_back_by is None:
        return False
    value = frame.evaluated(access.node)
    is_augmented = isinstance(getattr(access.node, "ctx", None), ast.Store)
    if is_augmented and (isinstance(value, _IN_PLACE) or hasattr(type(value), "__iadd__")):
        return False  # it is changed in place
    parts = [*ast.walk(access.goes_back_by)]
    if any(map(_is_clock, parts)):
        return False
    if _is_of_users_class(value) or _is_set_by_function(access.node, frame):
        return True
    return any(_calls(part, access.node, frame) for part in parts)


def _is_clock(part: ast.AST) -> bool:
    return name_called(part).removesuffix("_ns") in _CLOCKS


def _is_set_by_function(node: ast.expr, frame: Frame) -> bool:
    """Whether a function that is written in Python sets the value, as an object's own
    ``__setattr__`` does."""
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return False
    name = "__setattr__" if isinstance(node, ast.Attribute) else "__setitem__"
    setter = getattr(type(frame.evaluated(node.value)), name, None)
    return isinstance(setter, types.FunctionType)


def _calls(part: ast.AST, loaded: ast.expr, frame: Frame) -> bool:
    """Whether something may be called for a part of the expression."""
    if isinstance(part, ast.Call):
        return _end(part) > (loaded.lineno, loaded.col_offset)  # else it was called before
    if isinstance(part, ast.Attribute):
        owner = frame.evaluated(part.value)
        return isinstance(owner, Tensor) or isinstance(attribute_in(owner, part.attr), property)
    if isinstance(part, ast.BinOp | ast.Compare):
        operands = (part.left, *getattr(part, "comparators", ()), getattr(part, "right", None))
        return any(_is_of_users_class(frame.evaluated(one)) for one in operands if one is not None)
    return isinstance(part, _RUNS_CODE)


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _is_of_users_class(value: Any) -> bool:
    """Whether code runs for an operator of a value."""
    return isinstance(value, Tensor) or is_users(type(value).__module__)
