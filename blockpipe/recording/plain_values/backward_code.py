"""The user's code that a backward will run: hooks of modules, parameters and tensors.

No backward runs in a recording, so that their source is all there is to look at.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._common.modules import named_slots
from ..._torch.graph import gradient_hooks, stepping_hooks
from ..._torch.modules import backward_hooks_of, parameters_of
from ...restoring.model_state import is_users
from .accesses import calls_of, may_set
from .expressions import Frame

_MOST_CALLS = 50  # of one hook, and of what that calls: a guess


class StillFrame:
    """A function that is not running, as a frame.

    Args:
        function: the function.
        arguments: the first of its arguments, as far as they are known.
    """

    def __init__(self, function: types.FunctionType, arguments: tuple[Any, ...]) -> None:
        code = function.__code__
        self.f_code, self.f_globals = code, function.__globals__
        self.f_lineno = code.co_firstlineno
        self.f_locals: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.f_locals[name] = cell.cell_contents
            except ValueError:  # it is set later
                continue
        self.f_locals.update(zip(code.co_varnames[: code.co_argcount], arguments, strict=False))


class Hook(NamedTuple):
    """A hook that a backward calls.

    Attributes:
        function: the user's.
        given: the module or parameter that it is on.
        name: the name of that.
    """

    function: Callable[..., Any]
    given: nn.Module | Tensor
    name: str


def hooks_in(model: nn.Module) -> list[Hook]:
    """Return the hooks of a model's modules and parameters that a backward calls."""
    return [
        *(
            Hook(hook, m, path)
            for path, m in model.named_modules()
            for hook in backward_hooks_of(m)
        ),
        *(
            Hook(hook, parameter, name)
            for name, parameter in named_slots(model, parameters_of)
            for hooks in (gradient_hooks(parameter), stepping_hooks(parameter))
            for hook in (hooks or {}).values()
        ),
    ]


def may_set_by(hooks: Iterable[Hook]) -> bool:
    """Return whether any hook may set what outlives it."""
    return any(
        may_set(still.f_code) for hook in hooks for still in frames_of(hook.function, hook.given)
    )


def frames_of(hook: Callable[..., Any], given: object = None) -> Iterator[StillFrame]:
    """Yield the user's functions that a hook is and calls, as far as its source tells.

    Args:
        hook: a function, a method, or an object that can be called.
        given: its first argument; ``None``: it is not known.
    """
    todo: list[tuple[Any, tuple[Any, ...]]] = [(hook, () if given is None else (given,))]
    seen: set[types.CodeType] = set()
    while todo and len(seen) < _MOST_CALLS:
        called, arguments = todo.pop()
        if isinstance(called, functools.partial):
            todo.append((called.func, called.args))
            continue
        if not isinstance(called, types.FunctionType | types.MethodType | type):
            called = getattr(called, "__call__", called)  # noqa: B004 - of an object
        if isinstance(called, types.MethodType):
            todo.append((called.__func__, (called.__self__, *arguments)))
            continue
        if not isinstance(called, types.FunctionType) or not is_users(called.__module__):
            continue
        if called.__code__ in seen:
            continue
        seen.add(called.__code__)
        still = StillFrame(called, arguments)
        yield still
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        for call in calls_of(called.__code__):
            todo.append((frame.bound(call.func), ()))


def back(hop: int) -> int:
    """Return the number that a hop's backward has, where hops have theirs."""
    return -1 - hop


def hops_of(numbers: Iterable[int]) -> list[int]:
    """Return the hops of such numbers, and of hops."""
    return sorted({hop if hop >= 0 else back(hop) for hop in numbers})


def in_backward(numbers: Iterable[int]) -> str:
    """Return in words whether any of them is a backward's."""
    return " in a backward" if min(numbers) < 0 else ""
