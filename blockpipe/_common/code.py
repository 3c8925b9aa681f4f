"""The code that runs where something is called, as a key that keeps no object alive.

A function that is made anew for each step, with other numbers in it, has the same code; one that is
made around another function has not.
"""

import ast
import contextlib
import functools
import linecache
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from .._torch.modules import (
    backward_hooks_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    has_hooks,
)

_MOST_NESTED = 3  # functions in the closure of a function
_MOST_MEMBERS = 32  # of a container in it


def code_of(called: Any, depth: int = 0) -> Any:
    """Return the code of what is called, and of the functions that it closes over."""
    if isinstance(called, types.MethodType):
        return code_of(called.__func__, depth), type(called.__self__)
    if isinstance(called, functools.partial):
        return functools.partial, code_of(called.func, depth)
    if isinstance(called, types.FunctionType):
        if not called.__closure__ or depth == _MOST_NESTED:
            return called.__code__
        inner = tuple(_inner(called.__closure__, depth + 1))
        return (called.__code__, *inner) if inner else called.__code__
    if isinstance(called, nn.Module) and has_hooks(called):
        before, after = forward_pre_hooks_of(called), forward_hooks_of(called)
        hooks = *before.values(), *after.values(), *backward_hooks_of(called)
        return (type(called), *(code_of(hook, depth) for hook in hooks))
    return type(called)


def _inner(cells: tuple[types.CellType, ...], depth: int) -> Iterator[Any]:
    for cell in cells:
        try:
            held = cell.cell_contents
        except ValueError:  # it is set later
            continue
        members = held if isinstance(held, list | tuple) else [held]
        for member in members[:_MOST_MEMBERS]:
            if isinstance(member, types.FunctionType | types.MethodType | functools.partial):
                yield code_of(member, depth)


_NAMES: dict[type, tuple[str, ...]] = {  # of nodes
    ast.Attribute: ("attr",),
    ast.Name: ("id",),
    ast.arg: ("arg",),
    ast.keyword: ("arg",),
}
_sources: dict[str, list[str]] = {}  # by file, its texts so far: it may be edited and reloaded


def source_of(code: types.CodeType) -> str:
    """Return the text of the file that some code was compiled from, as it was then if it was read
    before; ``""``: there is none."""
    known = _sources.setdefault(code.co_filename, [])
    source = next((text for text in known if _is_in(code, text)), None)
    if source is None:
        linecache.checkcache(code.co_filename)
        source = "".join(linecache.getlines(code.co_filename))
        known += [] if source in known else [source]
    return source


def parsed(source: str) -> ast.Module:
    """Return the tree of a file's text, with private names as the compiler gives them:
    ``self.__scale`` in a class ``Net`` is ``self._Net__scale``.

    Raises:
        SyntaxError: it is no Python.
        ValueError: neither is it.
    """
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for kind in reversed(classes):  # the innermost first
        of_class = kind.name.lstrip("_")
        for node in ast.walk(kind) if of_class else ():
            for field in _NAMES.get(type(node), ()):
                name = getattr(node, field)
                if name and name.startswith("__") and not name.endswith("__"):
                    setattr(node, field, f"_{of_class}{name}")
    return tree


def _is_in(code: types.CodeType, source: str) -> bool:
    """Return whether code seems to be of a text: a function of its name and lines is there."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    where = code.co_name, code.co_firstlineno
    return any(first <= max(lines) <= last for first, last in _functions_in(source).get(where, ()))


@functools.lru_cache(64)
def _functions_in(source: str) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Return where the last statement of each function begins and ends, by its name and line."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                begin = min(line.lineno for line in (node, *node.decorator_list))
                last = node.body[-1].lineno, node.end_lineno or node.lineno
                found.setdefault((node.name, begin), []).append(last)
            elif isinstance(node, ast.Lambda):
                last = node.lineno, node.end_lineno or node.lineno
                found.setdefault(("<lambda>", node.lineno), []).append(last)
    return found
