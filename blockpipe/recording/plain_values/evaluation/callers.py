"""Who has called a running function of the user's, and what it was given."""

import ast
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...._common.libraries import is_users
from ...._torch.modules import forward_pre_hooks_of
from ..syntax.accesses import accesses_of, sources_of
from .expressions import Frame
from .members import UNKNOWN, attribute_in, is_one_of
from .still_frames import STOPS

_CALLS_FORWARDS = (nn.Module.__module__, f"{__name__.partition('.')[0]}.")


def caller_of(frame: types.FrameType) -> types.FrameType | None:
    """Return the frame that has called a function, or the module whose forward the function is."""
    caller = frame.f_back
    while caller is not None and str(caller.f_globals.get("__name__")).startswith(_CALLS_FORWARDS):
        caller = caller.f_back
    return caller


def call_of(frame: Frame) -> tuple[ast.Call, Frame] | None:
    """Return the call of a running function in the user's code, of a module for its forward, and
    the caller's frame."""
    caller = caller_of(frame.frame) if frame.is_running else None
    if caller is None or not is_users(caller.f_globals.get("__name__")):
        return None
    accesses = accesses_of(caller.f_code)
    # Python 3.11 says that it stands behind the call, in what it caches of it.
    latest = max((offset for offset in accesses if offset <= caller.f_lasti), default=-1)
    calls = [one.node for one in accesses.get(latest, ()) if isinstance(one.node, ast.Call)]
    if not calls:
        return None
    call, outer = calls[0], Frame(caller, {}, None)
    is_direct = frame.frame.f_back is caller
    return (call, outer) if is_direct or _called_by(call, outer) is frame.code else None


def _called_by(call: ast.Call, frame: Frame) -> types.CodeType | None:
    """Return the code that a call runs; of a module, its forward's, if that gets what the call
    gives."""
    function = frame.bound(call.func)
    if isinstance(function, nn.Module):
        hooks = forward_pre_hooks_of(function)  # which may replace it
        function = UNKNOWN if hooks else attribute_in(function, "forward")
    elif isinstance(called := attribute_in(type(function), "__call__"), types.FunctionType):
        function = called  # of an object
    return getattr(getattr(function, "__func__", function), "__code__", None)


def is_called_from_outside(frame: Frame) -> bool:
    """Return whether no code of the user's has called a running function."""
    caller = caller_of(frame.frame) if frame.is_running else None
    return caller is None or not is_users(caller.f_globals.get("__name__"))


def argument_of(name: str, frame: Frame) -> tuple[ast.expr | None, Frame] | None:
    """Return what a running function's caller gives it as an argument, and the caller's frame.

    Args:
        name: the argument's name.
        frame: the function's frame.

    Returns:
        ``None`` if that is not known; ``None`` for the expression if the argument has its default.
    """
    code = frame.code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name not in names or code.co_flags & STOPS or [*sources_of(code, name)]:
        return None
    if (call := call_of(frame)) is None:
        return None
    node, outer = call
    given, function = node.args, outer.bound(node.func)
    if _called_by(node, outer) is not code:
        return None
    if not isinstance(function, types.FunctionType):  # but a method, or an object
        if name == names[0]:
            is_method = isinstance(function, types.MethodType)
            owner = getattr(node.func, "value", None) if is_method else node.func
            return None if owner is None else (owner, outer)
        names = names[1:]
    by_name = {keyword.arg: keyword.value for keyword in node.keywords}
    is_starred = None in by_name or any(isinstance(one, ast.Starred) for one in given)
    if is_starred or name not in names:
        return None
    at = names.index(name)
    return given[at] if at < len(given) else by_name.get(name), outer


def is_bound_to_hook(value: Any, frame: Frame) -> bool:
    """Return whether a value was there when the hook was registered that a frame is of: by
    ``functools.partial``, as a default, or because the hook is an object, or its method.

    Args:
        value: an argument of the hook's.
        frame: the frame that may be a hook's.
    """
    caller = frame.frame.f_back if frame.is_running else None
    if caller is None or caller.f_globals.get("__name__") != nn.Module.__module__:
        return False
    hook = caller.f_locals.get("hook")
    return hook is not None and is_one_of(value, _bound_to(hook))


def _bound_to(hook: Any) -> Iterator[Any]:
    match hook:
        case functools.partial():
            yield from (*hook.args, *hook.keywords.values(), *_bound_to(hook.func))
        case types.MethodType():
            yield from (hook.__self__, *_bound_to(hook.__func__))
        case types.FunctionType():
            yield from (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
        case _:
            yield hook
