"""The sort of what a function beside the forward leads to, such as a loss.

A training loop may give its loss the model after a warm-up, or another function to call. That is
told by the sorts of what the function's code names: which class or code it is, or which switch or
text. Numbers, tensors and how many there are in a container do not count, for they may be others in
each step.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._common.libraries import has_users_code, is_users
from ..._torch.modules import (
    backward_hooks_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    within,
)
from ...batches.losses import WeightedLoss
from ...recording.reads import mentioned

_DEPTH = 4  # of objects in objects
_MOST = 64  # members of a container, and attributes of an object
_CONTAINERS = (list, tuple, set, frozenset, dict)


def sort_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return the sort of an object, as something that can be compared and hashed.

    Args:
        value: a function, or what one leads to.
        depth: how far to look into it.

    Example:
        >>> sort_of(0.5) == sort_of(2.0), sort_of(None) == sort_of(2.0)
        (True, False)
    """
    while isinstance(value, WeightedLoss):
        value = value.loss_fn
    if value is None or isinstance(value, bool | str | type):
        return value
    if isinstance(value, types.FunctionType):
        return value.__code__, *(_of_function(value, depth - 1) if depth else ())
    if depth and isinstance(value, types.MethodType):
        return sort_of(value.__func__, depth), sort_of(value.__self__, depth)
    if depth and isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.values())
        return sort_of(value.func, depth), *(sort_of(one, depth - 1) for one in given)
    if depth and isinstance(value, _CONTAINERS) and len(value) <= _MOST:
        members = [*(value.values() if isinstance(value, dict) else value)]
        return type(value), frozenset(sort_of(one, depth - 1) for one in members)
    if isinstance(value, nn.Module):
        hooks = frozenset(sort_of(hook, max(depth - 1, 0)) for hook in _hooks_inside(value))
        return type(value), frozenset(_types_inside(value)), hooks, *_of_object(value, depth)
    if depth and is_users(type(value).__module__):
        return type(value), *_of_object(value, depth)
    return type(value)


def _types_inside(module: nn.Module) -> Iterator[type]:
    """Yield the classes of a module's children, and of what torch's containers among them hold."""
    for child in children_of(module).values():
        yield type(child)
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _types_inside(child)


def _hooks_inside(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module and of those in it."""
    for inner in within(module):
        for hooks in (forward_pre_hooks_of(inner), forward_hooks_of(inner)):
            yield from hooks.values()
        yield from backward_hooks_of(inner)


def _of_function(function: types.FunctionType, depth: int) -> Iterator[Any]:
    if not has_users_code(function):
        return
    for cell in function.__closure__ or ():
        try:
            yield sort_of(cell.cell_contents, depth)
        except ValueError:  # it is not set yet
            yield None
    for given in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield sort_of(given, depth)
    names = function.__globals__
    for name in _names(function.__code__):
        if name in names:
            yield sort_of(names[name], depth)


def _of_object(value: Any, depth: int) -> Iterator[Any]:
    """Yield the sorts of the attributes that code of its class names, or that are code."""
    held = getattr(value, "__dict__", {})
    if depth and len(held) <= _MOST:
        kind: Any = type(value)
        for name in _names_of(kind):
            if name in held:
                yield name, sort_of(held[name], depth - 1)


@functools.lru_cache(10_000)
def _names(code: Any) -> tuple[str, ...]:
    return tuple(sorted(mentioned(code)))


@functools.lru_cache(1_000)
def _names_of(kind: Any) -> tuple[str, ...]:
    codes = (
        function.__code__
        for base in kind.__mro__
        if is_users(base.__module__)
        for member in vars(base).values()
        for function in _functions_of(member)
    )
    return tuple(sorted({"forward"}.union(*map(_names, codes))))


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """Yield the functions behind a member of a class, also those that a decorator is around."""
    if isinstance(member, property):
        yield from (
            one for one in (member.fget, member.fset) if isinstance(one, types.FunctionType)
        )
    member = getattr(member, "__func__", member)
    if isinstance(member, types.FunctionType):
        yield member
        for cell in member.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is not set yet
                if isinstance(inner := cell.cell_contents, types.FunctionType):
                    yield inner
