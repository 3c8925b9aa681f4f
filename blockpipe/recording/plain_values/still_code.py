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

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.modules import StandIn, named_slots
from ..._torch.graph import custom_backward_of, gradient_hooks, stepping_hooks
from ..._torch.modules import (
    backward_hooks_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
)
from ...batches.losses import WeightedLoss
from .evaluation.expressions import Frame, bound_by, members_of
from .evaluation.members import UNKNOWN, attribute_in, member_of
from .syntax.accesses import (
    Access,
    accesses_of,
    assignments_of,
    calls_of,
    captures_of,
    contexts_of,
    loops_of,
    may_set,
)
from .syntax.protocols import called_by_name, called_by_with, protocols_of
from .syntax.unknown_owners import Origins, begins_with_lasting, is_made, read_by_name
from .syntax.uses import Use

_MOST_CALLS = 50  # of one hook, and of what that calls: a guess
_MADE: Any = types.SimpleNamespace()  # an object that code makes there, which may lead anywhere
_MOST_TURNS = 32  # of one loop: a guess
_MOST_FRAMES = 200  # of one function, in the turns of all its loops together: a guess
_NUMBERS = (bool, int, float, str, type(None))
_CACHES = functools._lru_cache_wrapper
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, _CACHES)


class StillFrame:
    """A function that is not running, as a frame.

    Args:
        code: the function's code.
        names: the global variables of its module.
        known: its arguments and the variables around it, by name, as far as they are known.
        turned: the targets of the loops that it is in a turn of.
        cells: the variables around it by name, as far as they are known.
        is_inner: whether it is written inside of another one.
    """

    def __init__(
        self,
        code: types.CodeType,
        names: dict[str, Any],
        known: Mapping[str, Any],
        turned: frozenset[ast.expr] = frozenset(),
        cells: Mapping[str, types.CellType] | None = None,
        *,
        is_inner: bool = False,
    ) -> None:
        self._turned, self.f_cells, self.is_inner = turned, cells or {}, is_inner
        self.f_code, self.f_globals = code, names
        self.f_lineno = code.co_firstlineno
        self.f_locals = {name: value for name, value in known.items() if value is not UNKNOWN}
        frame = Frame(self, {}, None)  # type: ignore[arg-type]
        for name, expression in assignments_of(code):
            value = _or_unknown(frame.bound, expression)
            if value is not UNKNOWN and self.f_locals.get(name) is None:  # the first that is known
                self.f_locals[name] = value

    def named(self) -> tuple[object, ...]:
        """What its names stand for, by identity: equal for two frames that say the same."""
        return id(self.f_code), *sorted((name, id(value)) for name, value in self.f_locals.items())

    def inner(self) -> Iterator[StillFrame]:
        """Yield the functions that are written inside of this one, comprehensions too."""
        for code in self.f_code.co_consts:
            if isinstance(code, types.CodeType):
                own = {*code.co_varnames, *code.co_cellvars}
                around = {name: v for name, v in self.f_locals.items() if name not in own}
                cells = {name: c for name, c in self.f_cells.items() if name not in own}
                yield StillFrame(code, self.f_globals, around, cells=cells, is_inner=True)

    def turns(self) -> Iterator[StillFrame]:
        """Yield the function in each turn of its loops, as far as it is known what they run
        over."""
        frame = Frame(self, {}, None)  # type: ignore[arg-type]
        for target, over in loops_of(self.f_code):
            if target in self._turned:  # whether or not its member is known
                continue
            turned = self._turned | {target}
            members = _or_unknown(functools.partial(members_of, frame), over)
            for member in () if members is UNKNOWN else _some(members):
                new = {n: value for n, value in bound_by(target, member) if value is not UNKNOWN}
                if new:  # else it is what it was, turn after turn
                    known, inner = {**self.f_locals, **new}, self.is_inner
                    yield StillFrame(
                        self.f_code, self.f_globals, known, turned, self.f_cells, is_inner=inner
                    )


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


def read_of_unknown(access: Access, frame: Frame, is_lasting: Callable[[Any], bool]) -> str | None:
    """Return the name by which code reads an object that nobody can tell, but that may outlive the
    forward, or one behind a wrapper.

    Args:
        access: the access that reads it.
        frame: the frame that it is in.
        is_lasting: returns whether an object outlives the forward.
    """
    owner, name = read_by_name(access) or (None, None)
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
    wrapper does that hands reads on to what it is around."""
    kinds = (kind for kind in type(owner).__mro__ if kind is not nn.Module)
    return (
        isinstance(key, str)
        and any("__getattr__" in vars(kind) for kind in kinds)
        and member_of(owner, key) is UNKNOWN
    )


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
    todo = [(function, () if given is None else (given,))]
    seen, passed = set[tuple[int, ...]](), set[int]()  # the user's functions, and others
    while todo and len(seen) < _MOST_CALLS:
        called, arguments = todo.pop()
        if not isinstance(called, types.FunctionType):
            todo += _behind(called, arguments)
            continue
        # A decorator's function has the name and the module of the one that it is around.
        if not is_users(called.__globals__.get("__name__")):
            if id(called) not in passed:
                passed.add(id(called))
                todo += [(inner, arguments) for inner in _wrapped_by(called)]
            continue
        # Two functions of one decorator are around others.
        key = id(called.__code__), *map(id, called.__closure__ or ()), *map(id, arguments)
        if key in seen:
            continue
        first = _still(called, arguments, is_first=not seen)
        seen.add(key)
        for still in _with_inner(first):
            yield still
            todo += _called_by(still)


def _with_inner(first: StillFrame) -> Iterator[StillFrame]:
    """Yield a function, its turns, and the functions inside of it. Loops that follow each other
    multiply, so that there is a limit for all of them, and single turns come first; a turn in which
    each name is what it was before is left out."""
    frames, kept = deque([first]), {first.named(): first}  # which keep what is named
    while frames:
        still = frames.popleft()
        yield still
        for one in itertools.chain(still.inner(), still.turns()):
            if len(kept) >= _MOST_FRAMES:
                break
            if kept.setdefault(one.named(), one) is one:
                frames.append(one)


def _behind(called: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield what a call of an object calls, with its first arguments."""
    if isinstance(called, functools.partial):
        yield called.func, (*called.args, *arguments)
    elif isinstance(called, WeightedLoss):
        yield called.loss_fn, arguments
    elif isinstance(called, nn.Module | StandIn):  # a stand-in has the forward behind it
        yield getattr(called, "forward", None), arguments
        if isinstance(called, nn.Module):
            hooks = forward_pre_hooks_of(called), forward_hooks_of(called)
            yield from ((hook, (called,)) for of in hooks for hook in of.values())
            if not is_users(type(called).__module__):  # a library's code calls what is inside
                yield from ((child, ()) for child in children_of(called).values())
    elif isinstance(called, staticmethod):
        yield called.__func__, arguments
    elif isinstance(called, _CACHES):
        yield called.__wrapped__, arguments
    elif isinstance(called, types.MethodType):
        yield called.__func__, (called.__self__, *arguments)
    elif not isinstance(called, type):
        method = getattr(called, "__call__", None)  # noqa: B004 - of an object
        if isinstance(method, types.FunctionType | types.MethodType):
            yield method, arguments


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


def _still(
    function: types.FunctionType, arguments: tuple[Any, ...], *, is_first: bool
) -> StillFrame:
    code, known = function.__code__, dict[str, Any]()
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):  # it is set later
            known[name] = cell.cell_contents
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    given.update(function.__kwdefaults__ or {})
    # Autograd passes nothing beside the gradients. Who calls others may pass another number, but
    # hardly another object (``lambda x, net=net: …``).
    known.update({k: v for k, v in given.items() if is_first or not isinstance(v, _NUMBERS)})
    known.update(zip(names, arguments, strict=False))
    if code.co_flags & inspect.CO_VARARGS:
        known[code.co_varnames[len(names) + code.co_kwonlyargcount]] = arguments[len(names) :]
    return StillFrame(code, function.__globals__, known, cells=cells)


def _called_by(still: StillFrame) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield what a function calls, with its first arguments, and the functions that it hands on."""
    frame = Frame(still, {}, None)  # type: ignore[arg-type]
    for call in calls_of(still.f_code):
        arguments = tuple(_first_of(call.args, frame))
        yield from ((function, arguments) for function in _chosen_by(call.func, frame))
        for node in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(handed_on := _or_unknown(frame.bound, node), _FUNCTIONS):
                yield handed_on, ()
    for access in itertools.chain.from_iterable(accesses_of(still.f_code).values()):
        if isinstance(node := access.node, ast.Attribute):
            owner = _or_unknown(frame.evaluated, node.value)
            found = _or_unknown(functools.partial(attribute_in, owner), node.attr)
            if isinstance(found, property):
                yield (found.fset if access.writes else found.fget), (owner,)
            elif owner is not UNKNOWN:
                is_known = found is not UNKNOWN
                yield from called_by_name(owner, found, is_known=is_known)
        if access.use is Use.READ and not access.calls:
            value = _or_unknown(frame.bound, access.node)
            yield from ((method, (value,)) for method in protocols_of(value))
            yield from ((function, ()) for function in _functions_in(value))
    for context in contexts_of(still.f_code):
        value = _or_unknown(frame.evaluated, context)
        yield from ((method, (value,)) for method in called_by_with(value))
        if value is UNKNOWN and isinstance(context, ast.Call):
            made = _or_unknown(frame.evaluated, context.func)
            yield from ((method, (_MADE,)) for method in called_by_with(made))


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions that code which reads a value may call later: ``call = self.scale``."""
    members = value.values() if type(value) in (dict, OrderedDict, defaultdict) else value
    is_container = members is not value or type(value) in (list, tuple, deque)
    yield from (
        m for m in (_some(members) if is_container else [value]) if isinstance(m, _FUNCTIONS)
    )


def _chosen_by(node: ast.expr, frame: Frame) -> Iterator[Any]:
    """Yield the function that an expression is, or all that a number may choose among: it may be
    another one in the next step."""
    yield _or_unknown(frame.bound, node)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        written = getattr(node.value, "values", getattr(node.value, "elts", ()))  # {"l1": self.l1}
        yield from (_or_unknown(frame.bound, one) for one in written)
        table = _or_unknown(frame.evaluated, node.value)
        if isinstance(table, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            table = children_of(table)
        if isinstance(table, list | tuple | dict):
            yield from _some(table.values() if isinstance(table, dict) else table)


def _first_of(nodes: Iterable[ast.expr], frame: Frame) -> Iterator[Any]:
    """Yield the first arguments of a call, as far as they are known."""
    for node in nodes:
        if isinstance(node, ast.Starred):
            values = _or_unknown(frame.evaluated, node.value)
            yield from values if isinstance(values, tuple) else ()
            return
        yield _or_unknown(frame.evaluated, node)


def _some(members: Iterable[Any]) -> list[Any]:
    """Return all members, or as many as are looked at, from everywhere among them."""
    found = [*members]
    return found[:: len(found) // _MOST_TURNS + 1]


def _or_unknown(look: Callable[[Any], Any], at: Any) -> Any:
    try:
        return look(at)
    except Exception:  # of an object that cannot be looked at
        return UNKNOWN
