"""The places that calls read or set by names, in code that nobody looks into."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import os
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...._common.libraries import is_users
from ...._torch.modules import parameters_of, within
from ...reads import mentioned
from ..syntax.accesses import Access, asks_any_name
from ..syntax.effects import SETS_TORCHS
from .expressions import Frame, members_of
from .getters import asked_by_text, asked_of, hands_on, is_getter, is_setter, set_by
from .members import (
    ALL,
    NEEDS_GRADIENT,
    UNKNOWN,
    Names,
    is_one_of,
    member_of,
    own_attributes,
)
from .registered import added_to, along_path, places_of, walked_by
from .still_frames import StillFrame

_EVALUATES = vars(builtins)["eval"]
ASKS = (isinstance, type, id, hasattr, getattr, setattr, delattr, callable, vars, super)
_CACHE = functools._lru_cache_wrapper
_SETS_SUBMODULE = nn.Module.set_submodule.__name__
_Set = tuple[Any, Any, Any]  # an object, a name in it, and the value there before


def set_by_method(node: ast.expr, frame: Frame) -> list[_Set] | None:
    """Return the objects that a method of torch's sets an attribute of, its name, and its value:
    the modes of modules (``train``, ``eval``), or whether parameters need a gradient; ``None``: it
    is no such call."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    name = node.func.attr
    if name not in SETS_TORCHS:
        return None
    if frame.code.co_name in SETS_TORCHS:
        return []  # the user's own method: its call sets the same
    owner = frame.evaluated(node.func.value)
    sets_mode = name != "requires_grad_"
    if isinstance(owner, Tensor):
        return [] if sets_mode else [_set(owner, NEEDS_GRADIENT)]
    modules = within(owner) if isinstance(owner, nn.Module) else ()
    if sets_mode:
        return [_set(module, "training") for module in modules]
    held = (p for module in modules for p in parameters_of(module).values())
    return [_set(parameter, NEEDS_GRADIENT) for parameter in held if parameter is not None]


def _set(owner: Any, name: str) -> _Set:
    return owner, name, member_of(owner, name)


def asked_by_call(node: ast.expr, frame: Frame) -> Iterator[tuple[Any, Any]]:
    """Yield the places that a call reads by names, in code that nobody looks into: objects, which
    may be unknown, and names in them."""
    if not isinstance(node, ast.Call):
        return
    yield from walked_by(node, frame)
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        given = [frame.evaluated(arg) for arg in node.args]
        named = {one.arg: frame.evaluated(one.value) for one in node.keywords if one.arg}
        yield from asked_by_text(frame.evaluated(node.func.value), given, named)
    if frame.evaluated(node.func) is os.path.expandvars:
        yield os.environ._data, ALL  # type: ignore[attr-defined]
    if frame.evaluated(node.func) is _EVALUATES and node.args:
        text, *spaces = map(frame.evaluated, node.args)
        yield from _asked_in(text, [space for space in spaces if isinstance(space, dict)], frame)
    if isinstance(cached := frame.evaluated(node.func), _CACHE):
        yield cached, ALL  # a call that finds a result runs no code
    if asks_any_name(node):
        yield from ((one, ALL) for one in _without_telling(frame.evaluated(node.args[0])))
    for function, args in _called_by(node, frame):
        for owner, key in asked_of(function, args):
            yield owner, key
            yield from ((one, ALL) for one in _without_telling(owner))
    yield from _asked_by_layer(frame.evaluated(node.func))


def _without_telling(owner: Any) -> Iterator[Any]:
    """Yield those of an object and its classes whose attributes may be read by names that data
    choose, and of which no class tells while a step runs: a module's variables, classes, functions,
    and objects of libraries' classes.
    """
    if owner is UNKNOWN:
        return
    is_told = is_users(type(owner).__module__) or isinstance(owner, type | nn.Module)
    if isinstance(owner, types.ModuleType):
        yield Names(vars(owner))
    elif not is_told:
        yield owner
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    yield from (kind for kind in kinds if is_users(kind.__module__))


def _asked_in(text: Any, spaces: list[dict[str, Any]], frame: Frame) -> Iterator[tuple[Any, Any]]:
    """Yield the places that an expression reads which is a text.

    Args:
        text: the text.
        spaces: the variables that it has; those of the frame, if there are none.
        frame: the frame in which it is evaluated.
    """
    try:
        parts = [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (AttributeError, SyntaxError, ValueError):  # it is no text, or not known
        return
    around = frame.frame
    known = dict(itertools.chain.from_iterable(map(dict.items, spaces or [around.f_locals])))
    still = StillFrame(frame.code, around.f_globals, known)
    inner = Frame(still, {}, None)  # type: ignore[arg-type]
    for part in parts:
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript):
            owner, key, _ = inner.owner_of(Access(part, True, False))
            if owner is not None:
                yield owner, key


def _asked_by_layer(module: Any) -> Iterator[tuple[Any, str]]:
    """Yield the attributes that a call of a library's module reads, by the names in its code."""
    if isinstance(module, nn.Module) and not is_users(type(module).__module__):
        forward: Any = type(module).forward
        if isinstance(forward, types.FunctionType):
            named = mentioned(forward.__code__).intersection(own_attributes(module))
            yield from ((module, name) for name in named)


def set_by_call(node: ast.expr, frame: Frame) -> Iterator[_Set]:
    """Yield the objects that a call sets attributes of by their names, in code that nobody looks
    into, with the names and the values; and which members it adds to a module."""
    yield from places_of(added_to(node, frame))
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == _SETS_SUBMODULE:
        yield from (_set(*place) for place in [*along_path(node, frame)][-1:])
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == _CACHE.cache_clear.__name__:
        cached = frame.evaluated(node.func.value)  # type: ignore[attr-defined]
        yield from ((cached, ALL, UNKNOWN),) if isinstance(cached, _CACHE) else ()
    if isinstance(node, ast.Call) and not is_one_of(frame.evaluated(node.func), ASKS):
        for function, args in _called_by(node, frame):
            yield from (_set(owner, name) for owner, name in set_by(function, args))


def _called_by(node: ast.Call, frame: Frame) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the getters and setters that a call calls, each with what it is given."""
    function, over = frame.evaluated(node.func), node.args
    if is_getter(function) or is_setter(function) or function is functools.reduce:
        yield function, [*map(frame.evaluated, node.args)]
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr == "sort":
        over = [node.func.value]
    elif not hands_on(function):
        return
    for handed in (*node.args, *(one.value for one in node.keywords if one.arg == "key")):
        named = frame.evaluated(handed)
        if is_getter(named) or is_setter(named):
            others = [one for one in over if one is not handed]
            if is_one_of(function, (max, min)) and len(others) > 1:
                others = [ast.Tuple(others, ast.Load())]
            members = (members_of(frame, one) for one in others)
            known = [[UNKNOWN] if found is UNKNOWN else found for found in members]
            yield from ((named, [*args]) for args in zip(*known, strict=False))
