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
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.modules import StandIn, named_slots
from ..._common.threads.thread_state import ours
from ..._torch.graph import custom_backward_of, gradient_hooks, stepping_hooks
from ..._torch.modules import (
    backward_hooks_of,
    buffers_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
    within,
)
from ...batches.losses import WeightedLoss
from .evaluation.expressions import Frame, members_of
from .evaluation.members import UNKNOWN, attribute_in, is_one_of, member_of
from .evaluation.still_frames import (
    Given,
    Results,
    StillFrame,
    chosen_among,
    or_unknown,
    some_of,
    spread,
)
from .syntax.accesses import (
    Access,
    accesses_of,
    calls_of,
    captures_of,
    contexts_of,
    may_set,
)
from .syntax.effects import name_called, registers_hook
from .syntax.protocols import (
    called_by_name,
    called_by_with,
    of_entry,
    protocols_of,
    set_by,
)
from .syntax.unknown_owners import Origins, asked_by_name, begins_with_lasting, is_made
from .syntax.uses import Use

_MOST_CALLS = 50  # of one hook, and of what that calls: a guess
_MADE: Any = types.SimpleNamespace()  # an object that code makes there, which may lead anywhere
_CACHES, _CODE = functools._lru_cache_wrapper, types.CodeType
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, _CACHES)
_Call = tuple[Any, Given]  # what is called


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


def hooks_of(leaf: Tensor) -> Iterator[tuple[Callable[..., Any], Tensor | None]]:
    """Yield the hooks of a leaf that a backward calls, each with its first argument: the leaf, or
    ``None`` for a gradient."""
    with ours():  # a forward that looks at code is not the one that reads the leaf
        hooks, stepping = gradient_hooks(leaf) or {}, stepping_hooks(leaf) or {}
    yield from ((hook, None) for hook in hooks.values())
    yield from ((hook, leaf) for hook in stepping.values())


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


def adds_hooks(function: Callable[..., Any]) -> bool:
    """Return whether a function, or what it calls, may register a hook."""
    names = (name for still in frames_of(function) for name in still.f_code.co_names)
    return any(map(registers_hook, names))


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
    function: Callable[..., Any], given: object = None, *, hooks: list[StillFrame] | None = None
) -> Iterator[StillFrame]:
    """Yield the user's functions that a hook or a loss is and calls, as far as its source tells.

    Args:
        function: a function, a method, a module, or another object that can be called.
        given: its first argument, or all that a call gives it; ``None``: it is not known.
        hooks: gets those that it registers as hooks, and what they call, in their place; ``None``:
            they are among the others.
    """
    if not isinstance(given, Given):
        given = Given() if given is None else Given((given,))
    todo, results = [(function, given)], Results()
    seen, passed = set[tuple[Any, ...]](), set[int]()  # the user's functions, and others
    while todo and len(seen) < _MOST_CALLS:
        called, given = todo.pop()
        if not isinstance(called, types.FunctionType):
            todo += _behind(called, given)
            continue
        # A decorator's function has the name and the module of the one that it is around.
        if not is_users(called.__globals__.get("__name__")):
            if id(called) not in passed:
                passed.add(id(called))
                todo += [(inner, given) for inner in _wrapped_by(called)]
            continue
        # Two functions of one decorator are around others.
        key = id(called.__code__), *map(id, called.__closure__ or ()), given.by_identity()
        if key in seen:
            continue
        first = given.to(called, results, is_first=not seen)
        seen.add(key)
        for still in with_inner(first):
            later = () if hooks is None else _registered_by(still)
            if hooks is not None and still.f_code in _codes_registered(first.f_code):
                hooks.append(still)
                later = _called_by(still)
            else:
                yield still
                todo += _called_by(still, registers=hooks is None)
            for hook, its in later:
                hooks += frames_of(hook, its)  # type: ignore[operator]


def with_inner(first: StillFrame) -> Iterator[StillFrame]:
    """Yield a function, its turns, and the functions inside of it."""
    return spread(first, lambda still: itertools.chain(still.inner(), still.turns()))


def _behind(called: Any, given: Given) -> Iterator[_Call]:
    """Yield what a call of an object calls."""
    if isinstance(called, functools.partial):
        yield called.func, given.behind(*called.args).with_named(called.keywords)
    elif isinstance(called, WeightedLoss):
        yield called.loss_fn, given
    elif isinstance(called, nn.Module | StandIn):  # a stand-in has the forward behind it
        yield getattr(called, "forward", None), given
        if isinstance(called, nn.Module):
            hooks = forward_pre_hooks_of(called), forward_hooks_of(called)
            yield from ((hook, Given((called,))) for of in hooks for hook in of.values())
            hooks_later = ((hook, called) for hook in backward_hooks_of(called))
            leaves = [leaf for leaf in parameters_of(called).values() if leaf is not None]
            for hook, of in (*hooks_later, *itertools.chain.from_iterable(map(hooks_of, leaves))):
                yield hook, Given() if of is None else Given((of,))
            if not is_users(type(called).__module__):  # a library's code calls what is inside
                yield from ((child, Given()) for child in children_of(called).values())
    elif isinstance(called, staticmethod):
        yield called.__func__, given
    elif isinstance(called, _CACHES):
        yield called.__wrapped__, given
    elif isinstance(called, types.MethodType):
        yield called.__func__, given.behind(called.__self__)
    elif isinstance(called, type):
        for name in ("__init__", "__post_init__"):
            made = attribute_in(called, name)
            if isinstance(made, types.FunctionType):
                yield made, given.behind(_MADE)
    else:
        method = getattr(called, "__call__", None)  # noqa: B004 - of an object
        if isinstance(method, types.FunctionType | types.MethodType):
            yield method, given


def _wrapped_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield the functions of the user's that a library's function has been made around, such as a
    decorator's."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is set later
            inner = cell.cell_contents
            inner = custom_backward_of(inner) or inner
            if isinstance(inner, _FUNCTIONS):
                yield inner
    # functools.singledispatch has one for each class.
    registered = getattr(function, "registry", None)
    if isinstance(registered, Mapping):
        yield from (each for each in registered.values() if isinstance(each, _FUNCTIONS))


def _registered_by(still: StillFrame) -> Iterator[_Call]:
    """Yield the functions that a function registers as hooks, but for those inside of it."""
    frame = Frame(still, {}, None)  # type: ignore[arg-type]
    for call in calls_of(still.f_code):
        if registers_hook(name_called(call)):
            yield from handed_on_by(call, frame)


@functools.lru_cache(1_000)
def _codes_registered(code: types.CodeType) -> frozenset[types.CodeType]:
    """Return the functions inside of a function, at any depth, that are registered as hooks."""
    found, inner = set[types.CodeType](), [c for c in code.co_consts if isinstance(c, _CODE)]
    given = [one for c in calls_of(code) if registers_hook(name_called(c)) for one in c.args]
    names = {one.id for one in given if isinstance(one, ast.Name)}
    lines = {one.lineno for one in given if isinstance(one, ast.Lambda)}
    for one in inner:
        is_lambda = one.co_name == "<lambda>" and one.co_firstlineno in lines
        found |= {one} if is_lambda or one.co_name in names else _codes_registered(one)
    return frozenset(found)


def _called_by(still: StillFrame, *, registers: bool = True) -> Iterator[_Call]:
    """Yield what a function calls, and the functions that it hands on; also to be hooks."""
    frame = Frame(still, {}, None)  # type: ignore[arg-type]
    for call in calls_of(still.f_code):
        if not registers and registers_hook(name_called(call)):
            continue
        given = Given.by(call, frame)
        yield from ((function, given) for function in _chosen_by(call.func, frame))
        yield from handed_on_by(call, frame)
        yield from _applied_by(call, given, frame)
    for access in itertools.chain.from_iterable(accesses_of(still.f_code).values()):
        yield from called_at(access, frame)
    for context in contexts_of(still.f_code):
        value = or_unknown(frame.evaluated, context)
        yield from ((method, Given((value,))) for method in called_by_with(value))
        if value is UNKNOWN and isinstance(context, ast.Call):
            made = or_unknown(frame.evaluated, context.func)
            yield from ((method, Given((_MADE,))) for method in called_by_with(made))


def called_at(access: Access, frame: Frame) -> Iterator[_Call]:
    """Yield the user's methods that an access may run: a property, and those of the value for
    operators, loops and the like."""
    if isinstance(node := access.node, ast.Attribute):
        owner = or_unknown(frame.evaluated, node.value)
        found = or_unknown(functools.partial(attribute_in, owner), node.attr)
        if isinstance(found, property):
            yield (found.fset if access.writes else found.fget), Given((owner,))
        elif access.writes:
            yield from ((method, Given((found, owner))) for method in set_by(found))
        elif owner is not UNKNOWN:
            is_known = found is not UNKNOWN
            named = called_by_name(owner, found, is_known=is_known)
            yield from ((method, Given(first)) for method, first in named)
    elif isinstance(node, ast.Subscript):
        owner, key = (or_unknown(frame.evaluated, one) for one in (node.value, node.slice))
        found = of_entry(owner, writes=access.writes)
        yield from ((method, Given((owner, key))) for method in found)
    if access.use in (Use.READ, Use.BOTH) and not access.calls:  # BOTH: ``next(self.items)``
        value = or_unknown(frame.bound, access.node)
        yield from ((method, Given((value,))) for method in protocols_of(value))
        yield from ((function, Given()) for function in _functions_in(value))


def _applied_by(call: ast.Call, given: Given, frame: Frame) -> Iterator[_Call]:
    """Yield the methods of a custom function that a call applies, with its context."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != "apply":
        return
    kind = or_unknown(frame.evaluated, function.value)
    if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
        context = frame.frame.results.context_of(kind, given)
        has_context = kind.setup_context is torch.autograd.Function.setup_context
        yield kind.forward, given.behind(context) if has_context else given
        yield from ((method, Given((context,))) for method in (kind.backward, kind.vjp))


def handed_on_by(call: ast.Call, frame: Frame) -> Iterator[_Call]:
    """Yield the functions that a call hands on, with what is known to be given to them: by
    ``partial(f, x)``, by ``map(f, items)``, and by ``module.apply(f)``."""
    function, first = or_unknown(frame.evaluated, call.func), next(iter(call.args), None)
    for node in (*call.args, *(keyword.value for keyword in call.keywords)):
        if not isinstance(handed_on := or_unknown(frame.bound, node), _FUNCTIONS):
            continue
        if function is functools.partial and node is first:
            yield handed_on, Given.by(call, frame).of_partial()
        elif is_one_of(function, (map, filter)) and node is first and len(call.args) == 2:
            members = or_unknown(functools.partial(members_of, frame), call.args[1])
            known = [UNKNOWN] if members is UNKNOWN else some_of(members)
            yield from ((handed_on, Given((member,))) for member in known)
        elif function is nn.Module.apply:
            root = or_unknown(frame.evaluated, call.func.value)  # type: ignore[attr-defined]
            below = some_of(within(root)) if isinstance(root, nn.Module) else [UNKNOWN]
            yield from ((handed_on, Given((module,))) for module in below)
        else:
            yield handed_on, Given()


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions that code which reads a value may call later: ``call = self.scale``."""
    members = value.values() if type(value) in (dict, OrderedDict, defaultdict) else value
    is_container = members is not value or type(value) in (list, tuple, deque)
    yield from (
        m for m in (some_of(members) if is_container else [value]) if isinstance(m, _FUNCTIONS)
    )


def _chosen_by(node: ast.expr, frame: Frame) -> Iterator[Any]:
    """Yield the function that an expression is, or all that a number may choose among: it may be
    another one in the next step."""
    yield or_unknown(frame.bound, node)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        yield from chosen_among(node, frame)
