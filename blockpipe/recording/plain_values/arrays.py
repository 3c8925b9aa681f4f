"""Arrays of numpy, whose views are other objects each time."""

from __future__ import annotations

import ast
import sys
from array import array
from typing import Any

from .evaluation.expressions import Frame
from .evaluation.members import ALL, UNKNOWN
from .syntax.accesses import Access, loops_of, sources_of

# Methods of an array that give a view.
_VIEWS = ("ravel", "reshape", "view", "transpose", "swapaxes", "squeeze", "diagonal")
_MOST_NAMES = 4  # a guess


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def of_whole_arrays(access: Access, frame: Frame) -> tuple[Any, Any, Any]:
    """Return the place of an access, and the value there, with arrays in the place of views of
    theirs, which are other objects each time: ``self.counts[0][1] = n``.

    Args:
        access: the access.
        frame: the frame that it is in.
    """
    owner, key, value = frame.owner_of(access)
    if owner is None and isinstance(access.node, ast.Subscript | ast.Attribute):
        owner = _array_behind(access.node.value, frame)
        key = key if owner is None else ALL
    elif owner is None and isinstance(access.node, ast.Name) and not frame.is_running:
        behind = _array_behind(access.node, frame)  # ``row = self.counts[0]``, ``row += 1``
        value = value if behind is None else behind
    whole = _whole(owner)
    key = key if whole is owner else ALL
    return whole, key, whole if value is UNKNOWN and is_array(whole) else _whole(value)


def _array_behind(node: ast.expr, frame: Frame, taken: int = 0, depth: int = 0) -> Any:
    """Return the array of which an expression gives a view; ``None``: it gives none.

    Args:
        node: the expression.
        frame: the frame that it is in.
        taken: how many of the array's dims have an index.
        depth: how many variables were followed to what they are set to.
    """
    match node:
        case ast.Subscript(value=of, slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            taken += sum(not isinstance(part, ast.Slice) for part in parts)
        case ast.Attribute(value=of, attr="flat" | "T"):
            pass
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in _VIEWS:
            pass
        case ast.Name(id=name) if not frame.is_running and depth < _MOST_NAMES:
            for source, count in _sources(name, frame, taken):
                found = frame.evaluated(source)
                if not is_array(found):
                    found = _array_behind(source, frame, count, depth + 1)
                if is_array(found) and found.ndim > count:
                    return found
            return None
        case _:
            return None
    found = frame.evaluated(of)
    if not is_array(found):
        return _array_behind(of, frame, taken, depth)
    return found if found.ndim > taken or isinstance(node, ast.Attribute) else None


def _sources(name: str, frame: Frame, taken: int) -> list[tuple[ast.expr, int]]:
    """Return what a variable is set to, and what loops run over whose target it is: each turn of
    those has an index more."""
    loops = [over for target, over in loops_of(frame.code) if getattr(target, "id", "") == name]
    given = [one for one in sources_of(frame.code, name) if one not in loops]
    return [*((one, taken) for one in given), *((over, taken + 1) for over in loops)]


def _whole(value: Any) -> Any:
    while is_array(value) or _is_flat(value):
        base = value.base.obj if isinstance(value.base, memoryview) else value.base
        if not is_array(base) and not isinstance(base, bytearray | array):
            break
        value = base
    return value


def _is_flat(value: Any) -> bool:
    return type(value).__name__ == "flatiter"
