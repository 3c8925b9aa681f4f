"""The user's code that a step will run beside the forward: hooks, and the loss function.

Neither a loss nor a backward runs in a recording, so that their source is all there is to look at.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._common.modules import named_slots
from ..._torch.graph import gradient_hooks, stepping_hooks
from ..._torch.modules import backward_hooks_of, parameters_of
from ...batches.losses import WeightedLoss
from ...restoring.model_state import is_users
from .accesses import accesses_of, calls_of, may_set
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
        given: its first argument; ``None``: a gradient.
        name: the name of the module or parameter that it is on.
    """

    function: Callable[..., Any]
    given: nn.Module | Tensor | None
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
            Hook(hook, given, name)
            for name, parameter in named_slots(model, parameters_of)
            for hooks, given in (
                (gradient_hooks(parameter), None),
                (stepping_hooks(parameter), parameter),
            )
            for hook in (hooks or {}).values()
        ),
    ]


def may_set_by(functions: Iterable[Callable[..., Any]]) -> bool:
    """Return whether any function, or what it calls, may set what outlives it."""
    return any(may_set(still.f_code) for function in functions for still in frames_of(function))


def uses_state(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what it calls, may set or read what outlives it."""
    for still in frames_of(function):
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        for access in itertools.chain.from_iterable(accesses_of(still.f_code).values()):
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                if frame.owner_of(access)[0] is not None:
                    return True
    return False


def frames_of(function: Callable[..., Any], given: object = None) -> Iterator[StillFrame]:
    """Yield the user's functions that a hook or a loss is and calls, as far as its source tells.

    Args:
        function: a function, a method, a module, or another object that can be called.
        given: its first argument; ``None``: it is not known.
    """
    todo: list[tuple[Any, tuple[Any, ...]]] = [(function, () if given is None else (given,))]
    seen: set[types.CodeType] = set()
    while todo and len(seen) < _MOST_CALLS:
        called, arguments = todo.pop()
        if isinstance(called, functools.partial):
            todo.append((called.func, (*called.args, *arguments)))
            continue
        if isinstance(called, WeightedLoss):
            todo.append((called.loss_fn, arguments))
            continue
        if isinstance(called, nn.Module):
            called = called.forward
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
