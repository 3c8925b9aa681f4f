"""The user's code that a step will run beside the forward: what autograd calls, and the loss.

Neither a loss nor a backward runs in a recording, so that their source is all there is to look at.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.modules import named_slots
from ..._torch.modules import (
    backward_hooks_of,
    buffers_of,
    parameters_of,
)
from .evaluation.calls_behind import (
    Called,
    behind,
    called_by,
    called_by_another,
    hooks_of,
    later_behind,
    wrapped_by,
)
from .evaluation.expressions import Frame
from .evaluation.members import UNKNOWN, member_of
from .evaluation.still_frames import (
    Given,
    Results,
    StillFrame,
    spread,
)
from .syntax.accesses import (
    Access,
    accesses_of,
    calls_of,
    captures_of,
)
from .syntax.changes import may_set
from .syntax.later_calls import (
    called_again,
    called_later,
    codes_called_again,
    codes_called_later,
)
from .syntax.unknown_owners import Origins, asked_by_name, begins_with_lasting, is_made

_MOST_CALLS = 50  # of one hook, and of what that calls: a guess


class Later(NamedTuple):
    """The user's functions that autograd calls in a backward.

    Attributes:
        called: hooks, the backwards of custom functions, and what unpacks saved tensors.
        again: those of checkpoints, which have run in the forward, too.
        rerun: the functions and modules that checkpoints are given, also a library's.
    """

    called: list[StillFrame]
    again: list[StillFrame]
    rerun: list[Any]


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
            for slots in (parameters_of, buffers_of)
            for name, leaf in named_slots(model, slots)
            if leaf is not None
            for hook, given in hooks_of(leaf)
        ),
    ]


def frame_inside(function: Any, given: Given) -> Frame:
    """Return the frame of a function of the user's, or of a method, that a call calls.

    Args:
        function: the function.
        given: what the call gives it.
    """
    if isinstance(function, types.MethodType):
        function, given = function.__func__, given.behind(function.__self__)
    return Frame(given.to(function, is_first=False), {}, None)  # type: ignore[arg-type]


def named_of_unknown(access: Access, frame: Frame, is_lasting: Callable[[Any], bool]) -> str | None:
    """Return the name by which code reads or sets something in an object that nobody can tell, but
    that may outlive the forward, or in one behind a wrapper.

    Args:
        access: the access that does so.
        frame: the frame that it is in.
        is_lasting: returns whether an object outlives the forward.
    """
    owner, name = asked_by_name(access) or (None, None)
    if owner is None:
        return None
    if (known := frame.evaluated(owner)) is not UNKNOWN:
        return name if hands_on(known, name) else None
    if frame.is_running:
        may_last = begins_with_lasting(owner, frame.evaluated, UNKNOWN, is_lasting)
        return name if may_last and not is_made(owner, frame.evaluated) else None
    still, code = frame.frame, frame.code
    several = [code.co_flags & flag for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)]
    count = code.co_argcount + code.co_kwonlyargcount + sum(map(bool, several))
    parameters = code.co_varnames[:count]
    is_inner, captures = getattr(still, "is_inner", False), captures_of(code)
    origins = Origins(frame.evaluated, UNKNOWN, parameters, captures, is_inner=is_inner)
    return name if origins.may_last(owner) else None


def hands_on(owner: Any, key: Any) -> bool:
    """Return whether an object has no such attribute, and its class may find it elsewhere, as a
    wrapper does that hands reads on to what it is around; of a class, whether its objects may have
    the attributes of another object."""
    if isinstance(owner, type):
        return _shares_attributes(owner)
    kinds = (kind for kind in type(owner).__mro__ if kind is not nn.Module)
    return (
        isinstance(key, str)
        and any("__getattr__" in vars(kind) for kind in kinds)
        and member_of(owner, key) is UNKNOWN
    )


@functools.lru_cache(1_000)
def _shares_attributes(kind: type) -> bool:
    methods = (m for base in kind.__mro__ if is_users(base.__module__) for m in vars(base).values())
    codes = (m.__code__ for m in methods if isinstance(m, types.FunctionType))
    return any("__dict__" in code.co_names for code in codes)


def functions_by_code(objects: Iterable[Any]) -> dict[int, list[types.FunctionType]]:
    """Return the functions among some objects, by the ids of their code."""
    found: dict[int, list[types.FunctionType]] = {}
    for function in objects:
        if isinstance(function, types.FunctionType):
            same = found.setdefault(id(function.__code__), [])
            same += [] if function in same else [function]
    return found


def may_set_by(functions: Iterable[Callable[..., Any]]) -> bool:
    """Return whether any function, or what it calls, may set what outlives it."""
    return any(may_set(still.f_code) for function in functions for still in frames_of(function))


def hands_to_autograd(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what it calls, may hand another one to autograd."""
    stills = frames_of(function)
    return any(called_later(call) for still in stills for call in calls_of(still.f_code))


def uses_state(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what it calls, may set or read what outlives it."""
    for still in frames_of(function):
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        for access in itertools.chain.from_iterable(accesses_of(still.f_code).values()):
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                if frame.owner_of(access)[0] is not None:
                    return True
    return False


def frames_of(
    function: Callable[..., Any], given: object = None, *, later: Later | None = None
) -> Iterator[StillFrame]:
    """Yield the user's functions that a hook or a loss is and calls, as far as its source tells.

    Args:
        function: a function, a method, a module, or another object that can be called.
        given: its first argument, or all that a call gives it; ``None``: it is not known.
        later: gets those that autograd calls, and what they call, in their place; ``None``: they
            are among the others.
    """
    if not isinstance(given, Given):
        given = Given() if given is None else Given((given,))
    todo, results = [(function, given)], Results()
    seen, passed = set[tuple[Any, ...]](), set[int]()  # the user's functions, and others
    while todo and len(seen) < _MOST_CALLS:
        called, given = todo.pop()
        if not isinstance(called, types.FunctionType):
            todo += behind(called, given, results)
            found = later_behind(called, given, results)
            if later is None:
                todo += found
            else:
                later.called.extend(_frames_of_each(found))
            continue
        # A decorator's function has the name and the module of the one that it is around.
        if not is_users(called.__globals__.get("__name__")):
            if id(called) not in passed:
                passed.add(id(called))
                todo += [(inner, given) for inner in wrapped_by(called)]
            continue
        # Two functions of one decorator are around others.
        key = id(called.__code__), *map(id, called.__closure__ or ()), given.by_identity()
        if key in seen:
            continue
        first = given.to(called, results, is_first=not seen)
        seen.add(key)
        for still in with_inner(first):
            if later is None or _runs_now(still, first, later):
                yield still
                todo += called_by(still, goes_later=later is None)


def _runs_now(still: StillFrame, first: StillFrame, later: Later) -> bool:
    """Return whether a function that is written in another one is called in the forward, and note
    what either it, or what it calls, is later."""
    if still.f_code in codes_called_later(first.f_code):
        later.called.extend([still, *_frames_of_each(called_by(still))])
        return False
    if still.f_code in codes_called_again(first.f_code):
        later.again.extend([still, *_frames_of_each(called_by(still))])
        later.rerun.append(still.f_code)
    for call in calls_of(still.f_code):
        note_later(call, Frame(still, {}, None), later)  # type: ignore[arg-type]
    return True


def note_later(call: ast.Call, frame: Frame, later: Later) -> None:
    """Note what a call in a frame hands to autograd, but for functions that are written there."""
    for node in called_later(call):
        later.called.extend(_frames_of_each(called_by_another(node, frame)))
    for node in called_again(call):
        functions = [*called_by_another(node, frame)]
        later.rerun.extend(function for function, _ in functions)
        later.again.extend(_frames_of_each(functions))


def _frames_of_each(calls: Iterable[Called]) -> Iterator[StillFrame]:
    for function, given in calls:
        yield from frames_of(function, given)


def with_inner(first: StillFrame) -> Iterator[StillFrame]:
    """Yield a function, its turns, and the functions inside of it."""
    return spread(first, lambda still: itertools.chain(still.inner(), still.turns()))
