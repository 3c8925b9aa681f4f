"""The package with one thing left out: a wait, a protection of memory, an event, a release, the
forward lock.

A mutant is a function whose code has one call less. It is put in place of the function's own code, so
that whoever has imported the function runs it.
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

# What is left out where it is a statement.
WAITS = {"wait_event", "record_stream", "synchronize", "settle", "settle_on", "settle_all"}
RELEASES = {"release", "give_forward_lock"}
FORWARD_LOCK = {"take_forward_lock"}
# What is there in its place where its value is used: an event that was never recorded.
EVENTS = {"record_event"}


@dataclass(frozen=True)
class Mutant:
    """A call that is left out, by its place."""

    module: str
    qualname: str
    call: str
    nth: int  # of those that read the same in this function

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}: {self.call}" + (f" ({self.nth})" * (self.nth > 0))


def mutants(modules: list[str], names: set[str]) -> list[Mutant]:
    """All calls of these names in some modules of the package."""
    found = []
    for module in modules:
        counts: dict[tuple[str, str], int] = {}
        for qualname, call in _calls(_tree(module), names):
            key = qualname, ast.unparse(call)
            found.append(Mutant(module, *key, counts.get(key, 0)))
            counts[key] = counts.get(key, 0) + 1
    return found


@contextmanager
def without(mutant: Mutant) -> Iterator[None]:
    """While entered, the package is without that call."""
    tree = _tree(mutant.module)
    nth = mutant.nth
    for qualname, call in _calls(tree, WAITS | RELEASES | EVENTS | FORWARD_LOCK):
        if (qualname, ast.unparse(call)) == (mutant.qualname, mutant.call):
            if nth == 0:
                _leave_out(call)
                break
            nth -= 1
    else:
        raise LookupError(f"no such call: {mutant}")
    module = importlib.import_module(f"blockpipe.{mutant.module}")
    function = _function(module, mutant.qualname)
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    vars(module).setdefault("torch", torch)
    before = function.__code__
    function.__code__ = _code(code, mutant.qualname)
    try:
        yield
    finally:
        function.__code__ = before


def _tree(module: str) -> ast.Module:
    path = importlib.import_module(f"blockpipe.{module}").__file__
    assert path is not None
    with open(path) as file:
        return ast.parse(file.read())


def _calls(node: ast.AST, names: set[str], qualname: str = "") -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = qualname
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            between = ".<locals>." if isinstance(node, ast.FunctionDef) else "."
            inner = f"{qualname}{between}{child.name}" if qualname else child.name
        if isinstance(child, ast.Call) and _name(child) in names:
            yield qualname, child
        yield from _calls(child, names, inner)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _leave_out(call: ast.Call) -> None:
    """Keep what the call's arguments do, and not the call."""
    if _name(call) in EVENTS:
        call.func = ast.parse("torch.Event", mode="eval").body
        call.args, call.keywords = [], []
    else:
        call.func = ast.parse("(lambda *_, **__: None)", mode="eval").body


def _function(module: ModuleType, qualname: str) -> FunctionType:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    if not isinstance(found, FunctionType):
        found = found.fget if isinstance(found, property) else found.__func__
    assert isinstance(found, FunctionType)
    return found


def _code(code: CodeType, qualname: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualname:
                return constant
            if qualname.startswith(f"{constant.co_qualname}."):
                return _code(constant, qualname)
    raise LookupError(qualname)
