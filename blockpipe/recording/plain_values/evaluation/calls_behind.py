"""What a call calls, and what an access does, as far as the source and the objects tell."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...._common.libraries import is_users
from ...._common.modules import StandIn
from ...._common.threads.thread_state import ours
from ...._torch.graph import custom_backward_of, gradient_hooks, stepping_hooks
from ...._torch.modules import (
    backward_hooks_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
    within,
)
from ....batches.losses import WeightedLoss
from ..syntax.accesses import Access, accesses_of, calls_of, contexts_of, sources_of
from ..syntax.contents import alternatives
from ..syntax.effects import CALLS_MODULES, arguments_of, name_called
from ..syntax.later_calls import called_later
from ..syntax.protocols import called_by_name, called_by_with, of_entry, protocols_of, set_by
from ..syntax.uses import Use
from .expressions import Frame, members_of
from .getters import method_called
from .members import UNKNOWN, attribute_in, is_one_of
from .still_frames import Given, Results, StillFrame, chosen_among, or_unknown, some_of

_MADE: Any = types.SimpleNamespace()  # an object that code makes there, which may lead anywhere
_CACHES = functools._lru_cache_wrapper
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, _CACHES)
Called = tuple[Any, Given]
"""What is called, and what it is given."""


def hooks_of(leaf: Tensor) -> Iterator[tuple[Callable[..., Any], Tensor | None]]:
    """Yield the hooks of a leaf that a backward calls, each with its first argument: the leaf, or
    ``None`` for a gradient."""
    with ours():  # a forward that looks at code is not the one that reads the leaf
        hooks, stepping = gradient_hooks(leaf) or {}, stepping_hooks(leaf) or {}
    yield from ((hook, None) for hook in hooks.values())
    yield from ((hook, leaf) for hook in stepping.values())


def behind(called: Any, given: Given, results: Results) -> Iterator[Called]:
    """Yield what a call of an object calls.

    Args:
        called: the object.
        given: what the call gives it.
        results: what other calls give.
    """
    if (kind := _applied_by(called)) is not None:
        has_context = kind.setup_context is torch.autograd.Function.setup_context
        context = [results.context_of(kind, given)] if has_context else []
        yield kind.forward, given.behind(*context)
    elif isinstance(called, functools.partial):
        yield called.func, given.behind(*called.args).with_named(called.keywords)
    elif isinstance(called, operator.methodcaller):
        yield method_called(called, next(iter(given.first), UNKNOWN)), Given()
    elif isinstance(called, WeightedLoss):
        yield called.loss_fn, given
    elif isinstance(called, nn.Module | StandIn):  # a stand-in has the forward behind it
        yield getattr(called, "forward", None), given
        if isinstance(called, nn.Module):
            hooks = forward_pre_hooks_of(called), forward_hooks_of(called)
            yield from ((hook, Given((called,))) for of in hooks for hook in of.values())
            yield from _called_inside(called)
            yield from _overrides(called, type(called).forward)
    elif isinstance(called, staticmethod):
        yield called.__func__, given
    elif isinstance(called, _CACHES):
        yield called.__wrapped__, given
    elif isinstance(called, types.MethodType):
        owner = called.__self__
        is_call = isinstance(owner, nn.Module) and called.__func__ is vars(nn.Module)["__call__"]
        yield (owner, given) if is_call else (called.__func__, given.behind(owner))
        if called.__func__.__name__ == "forward" and isinstance(owner, nn.Module):
            yield from _called_inside(owner)
    elif isinstance(called, type):
        for name in ("__init__", "__post_init__"):
            made = attribute_in(called, name)
            if isinstance(made, types.FunctionType):
                yield made, given.behind(_MADE)
    else:
        method = getattr(called, "__call__", None)  # noqa: B004 - of an object
        if isinstance(method, types.FunctionType | types.MethodType):
            yield method, given
            yield from _overrides(called, getattr(method, "__func__", method))


def _called_inside(module: nn.Module) -> Iterator[Called]:
    """Yield what is inside of a library's module, whose code calls that: other modules, and
    functions of the user's (``activation``, ``distance_function``)."""
    if not is_users(type(module).__module__):
        yield from ((child, Given()) for child in children_of(module).values())
        yield from ((one, Given()) for one in vars(module).values() if _is_given_function(one))


def _is_given_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType) and is_users(value.__module__)


def _overrides(owner: Any, function: Any) -> Iterator[Called]:
    """Yield the methods with which a class of the user's overrides those that a library's function
    may call: ``_ff_block`` of a layer, ``_call`` of a transform."""
    if is_users(getattr(function, "__module__", None)):
        return
    kinds = type(owner).__mro__
    theirs = {name for kind in kinds if not is_users(kind.__module__) for name in vars(kind)}
    for kind in kinds:
        own = vars(kind).items() if is_users(kind.__module__) else ()
        for name, member in own:
            is_method = isinstance(member, types.FunctionType) and not name.startswith("__")
            if is_method and name in theirs and member is not function:
                yield types.MethodType(member, owner), Given()


def later_behind(called: Any, given: Given, results: Results) -> Iterator[Called]:
    """Yield what autograd calls in the backward of a call of an object, as in :func:`behind`: the
    backward of a custom function, or a module's hooks."""
    if (kind := _applied_by(called)) is not None:
        context = Given((results.context_of(kind, given),))
        yield from ((method, context) for method in (kind.backward, kind.vjp))
    elif isinstance(called, nn.Module):
        leaves = [leaf for leaf in parameters_of(called).values() if leaf is not None]
        of_leaves = itertools.chain.from_iterable(map(hooks_of, leaves))
        for hook, of in (*((hook, called) for hook in backward_hooks_of(called)), *of_leaves):
            yield hook, Given() if of is None else Given((of,))


def _applied_by(called: Any) -> Any:
    """Return the custom function of which this is ``apply``; ``None`` if it is none. While a model
    is recorded, another method stands for torch's, unless that was kept before."""
    if isinstance(called, types.MethodType):
        is_torchs = not is_users(called.__func__.__module__)
    else:
        is_torchs = isinstance(called, types.BuiltinMethodType)
    kind = called.__self__ if is_torchs else None
    return kind if isinstance(kind, type) and issubclass(kind, torch.autograd.Function) else None


def _is_function(value: Any) -> bool:
    return isinstance(value, _FUNCTIONS) or _applied_by(value) is not None


def wrapped_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield the functions of the user's that a library's function has been made around, such as a
    decorator's."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is set later
            inner = cell.cell_contents
            inner = custom_backward_of(inner) or inner
            if _is_function(inner):
                yield inner
    # functools.singledispatch has one for each class.
    registered = getattr(function, "registry", None)
    if isinstance(registered, Mapping):
        yield from (each for each in registered.values() if _is_function(each))


def called_by(still: StillFrame, *, goes_later: bool = True) -> Iterator[Called]:
    """Yield what a function calls, and the functions that it hands on; also to autograd, if what
    is called later counts."""
    frame = Frame(still, {}, None)  # type: ignore[arg-type]
    for call in calls_of(still.f_code):
        given = Given.by(call, frame)
        yield from ((function, given) for function in _chosen_by(call.func, frame))
        yield from handed_on_by(call, frame, () if goes_later else called_later(call))
    for access in itertools.chain.from_iterable(accesses_of(still.f_code).values()):
        yield from called_at(access, frame)


def called_at(access: Access, frame: Frame) -> Iterator[Called]:
    """Yield the user's methods that an access may run: a property, and those of the value for
    operators, loops, ``with`` and the like."""
    if access.node in contexts_of(frame.code):
        yield from _called_by_context(access.node, frame)
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
        value = _value_of(access.node, frame)
        yield from ((method, Given((value,))) for method in protocols_of(value))
        yield from ((function, Given()) for function in _functions_in(value))


def _called_by_context(node: ast.expr, frame: Frame) -> Iterator[Called]:
    """Yield the methods of the user's that a ``with`` statement calls of what an expression is."""
    value = _value_of(node, frame)
    if value is UNKNOWN and isinstance(node, ast.Call):
        kind, value = or_unknown(frame.evaluated, node.func), _MADE
        yield from ((method, Given((value,))) for method in called_by_with(kind))
    yield from ((method, Given((value,))) for method in called_by_with(value))


def _value_of(node: ast.expr, frame: Frame) -> Any:
    """Return what an expression is, of a call an object like the one that it makes."""
    value = or_unknown(frame.bound, node)
    if value is UNKNOWN and isinstance(node, ast.Call):
        value = Results().of(or_unknown(frame.bound, node.func), Given.by(node, frame))
    return value


def called_by_another(node: ast.expr, frame: Frame) -> Iterator[Called]:
    """Yield the functions, or the objects with one, that an expression may give to who calls it,
    also by a variable."""
    sources = [node]
    if isinstance(node, ast.Name) and or_unknown(frame.evaluated, node) is UNKNOWN:
        sources = sources_of(frame.code, node.id)
    for one in itertools.chain.from_iterable(map(alternatives, sources)):
        value = or_unknown(frame.bound, one)
        if _is_function(value) or isinstance(value, nn.Module) or is_users(type(value).__module__):
            yield value, Given()
        elif isinstance(one, ast.Call):  # ``partial(hook, self)``
            yield from handed_on_by(one, frame)


def handed_on_by(
    call: ast.Call, frame: Frame, without: Container[ast.expr] = ()
) -> Iterator[Called]:
    """Yield the functions that a call hands on, with what is known to be given to them: by
    ``partial(f, x)``, by ``map(f, items)``, and by ``module.apply(f)``.

    Args:
        call: the call.
        frame: the frame that it is in.
        without: arguments that do not count.
    """
    function, first = or_unknown(frame.evaluated, call.func), next(iter(call.args), None)
    for node in arguments_of(call):
        if node in without:
            continue
        handed_on = or_unknown(frame.bound, node)
        is_called = isinstance(handed_on, nn.Module) and name_called(call) in CALLS_MODULES
        if not (is_called or _is_function(handed_on)):
            continue
        if function is functools.partial and node is first:
            yield handed_on, Given.by(call, frame).of_partial()
        elif is_one_of(function, (map, filter)) and node is first and len(call.args) == 2:
            yield from ((handed_on, Given((one,))) for one in _members(call.args[1], frame))
        elif function is functools.reduce and node is first and len(call.args) > 1:
            so_far = or_unknown(frame.bound, call.args[2]) if len(call.args) > 2 else UNKNOWN
            known = _members(call.args[1], frame)
            yield from ((handed_on, Given((so_far, one))) for one in known)
        elif function is nn.Module.apply:
            root = or_unknown(frame.evaluated, call.func.value)  # type: ignore[attr-defined]
            below = some_of(within(root)) if isinstance(root, nn.Module) else [UNKNOWN]
            yield from ((handed_on, Given((module,))) for module in below)
        else:
            yield handed_on, Given()


def _members(node: ast.expr, frame: Frame) -> list[Any]:
    """Return the members of what an expression is; one that is unknown, if that is."""
    members = or_unknown(functools.partial(members_of, frame), node)
    return [UNKNOWN] if members is UNKNOWN else some_of(members)


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions that code which reads a value may call later: ``call = self.scale``."""
    members = value.values() if type(value) in (dict, OrderedDict, defaultdict) else value
    is_container = members is not value or type(value) in (list, tuple, deque)
    yield from (m for m in (some_of(members) if is_container else [value]) if _is_function(m))


def _chosen_by(node: ast.expr, frame: Frame) -> Iterator[Any]:
    """Yield the function that an expression is, or all that a number may choose among: it may be
    another one in the next step."""
    yield or_unknown(frame.bound, node)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        yield from chosen_among(node, frame)
