"""What code hands to autograd, which calls it in a backward, by the names of those who take it."""

import ast
import functools
import types
from collections.abc import Callable, Iterator

from .accesses import calls_of
from .effects import CHECKPOINTS, arguments_of, name_called, registers_hook

_PACKS = "saved_tensors_hooks"


def called_later(call: ast.Call) -> list[ast.expr]:
    """Return the arguments that are called in the backward alone: hooks, and what unpacks saved
    tensors."""
    if name_called(call) == _PACKS or _is_init_of_super(call):
        named = (one.value for one in call.keywords if one.arg == "unpack_hook")
        return [*call.args[1:2], *named]
    return arguments_of(call) if registers_hook(name_called(call)) else []


def _is_init_of_super(call: ast.Call) -> bool:
    """Whether it may be what a subclass of these hooks is made by: others take no function so."""
    owner = getattr(call.func, "value", call.func)
    return name_called(call) == "__init__" and name_called(owner) == "super"


def called_again(call: ast.Call) -> list[ast.expr]:
    """Return the arguments that are called now, and once more in the backward."""
    return arguments_of(call) if name_called(call) in CHECKPOINTS else []


@functools.lru_cache(1_000)
def codes_called_later(code: types.CodeType) -> frozenset[types.CodeType]:
    """Return the functions inside of a function, at any depth, that are called in the backward
    alone; and those inside of them."""
    return _codes_given(code, called_later)


@functools.lru_cache(1_000)
def codes_called_again(code: types.CodeType) -> frozenset[types.CodeType]:
    """Return the functions inside of a function, at any depth, that are called once more; and
    those inside of them."""
    return _codes_given(code, called_again)


def _codes_given(
    code: types.CodeType, given_by: Callable[[ast.Call], list[ast.expr]]
) -> frozenset[types.CodeType]:
    given = [one for call in calls_of(code) for one in given_by(call)]
    found = set[types.CodeType]()
    for inner in _inside(code):
        found |= {*_all_in(inner)} if _is_among(inner, given) else _codes_given(inner, given_by)
    return frozenset(found)


def _inside(code: types.CodeType) -> list[types.CodeType]:
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _all_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in _inside(code):
        yield from _all_in(inner)


def _is_among(code: types.CodeType, nodes: list[ast.expr]) -> bool:
    if code.co_name == "<lambda>":
        lambdas = (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Lambda))
        return code.co_firstlineno in {one.lineno for one in lambdas}
    return code.co_name in {one.id for one in nodes if isinstance(one, ast.Name)}
