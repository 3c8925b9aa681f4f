"""Functions that do not run, as frames: what their names stand for, and what their calls give.

All of it is known as far as the source tells.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...._common.libraries import is_users
from ...._torch.modules import children_of
from ..syntax.accesses import accesses_of, assignments_of, loops_of, returned_by, sources_of
from .expressions import Frame, members_of
from .members import UNKNOWN, attribute_in, makes_new, own_attributes
from .targets import bound_by, set_by_turn

_MOST_TURNS = 32  # of one loop: a guess
_MOST_FRAMES = 200  # of one function, in the turns of all its loops together: a guess
_MOST_RESULTS, _MOST_DEEP = 50, 4  # of calls that are followed: guesses
_NUMBERS = (bool, int, float, str, type(None))
STOPS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""The flags of code that stops in between: a generator's, or a coroutine's."""
_REST: Any = object()  # what a ``*args`` gives of which nothing is known


class StillFrame:
    """A function that is not running, as a frame.

    Args:
        code: the function's code.
        names: the global variables of its module.
        known: its arguments and the variables around it, by name, as far as they are known.
        turned: the targets of the loops that it is in a turn of.
        cells: the variables around it by name, as far as they are known.
        is_inner: whether it is written inside of another one.
        results: what its calls give.
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
        results: Results | None = None,
    ) -> None:
        self._turned, self.f_cells, self.is_inner = turned, cells or {}, is_inner
        self.results = results or Results()
        self.f_code, self.f_globals = code, names
        self.f_lineno = code.co_firstlineno
        self.f_locals = {name: value for name, value in known.items() if value is not UNKNOWN}
        frame = Frame(self, {}, None)  # type: ignore[arg-type]
        for name, expression in assignments_of(code):
            value = or_unknown(frame.bound, expression)
            if value is not UNKNOWN and self.f_locals.get(name) is None:  # the first that is known
                self.f_locals[name] = value

    def given_by(self, called: Any, call: ast.Call, frame: Frame) -> Any:
        """Return what a call in this code gives."""
        return self.results.of(called, Given.by(call, frame))

    def entry_of(self, owner: Any, key: Any) -> Any:
        """Return what an object's own method gives for a key."""
        method = attribute_in(type(owner), "__getitem__")
        return self.results.of(method, Given((owner, key), is_all=True))

    def function_named(self, name: str) -> Any:
        """Return a function that is written in this code, by its name; ``UNKNOWN`` if none is."""
        found = [c for c in self.f_code.co_consts if getattr(c, "co_name", None) == name]
        return self._function(found[0], ()) if len(found) == 1 else UNKNOWN

    def function_of(self, node: ast.Lambda) -> Any:
        """Return the function that a lambda is in this code."""
        names = tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args))
        for code in self.f_code.co_consts:
            is_lambda = getattr(code, "co_name", None) == "<lambda>"
            if is_lambda and (code.co_firstlineno, code.co_varnames[: code.co_argcount]) == (
                node.lineno,
                names,
            ):
                frame = Frame(self, {}, None)  # type: ignore[arg-type]
                return self._function(
                    code, (or_unknown(frame.bound, d) for d in node.args.defaults)
                )
        return UNKNOWN

    def _function(self, code: types.CodeType, defaults: Iterable[Any]) -> types.FunctionType:
        """Return a function like the one that this code makes, around what is known here."""
        around = {name: self.f_locals.get(name, UNKNOWN) for name in code.co_freevars}
        cells = (
            self.f_cells.get(name, types.CellType(*(() if value is UNKNOWN else (value,))))
            for name, value in around.items()
        )
        return self.results.function(code, self.f_globals, tuple(defaults), tuple(cells), around)

    def of_property(self, found: property, owner: Any) -> Any:
        """Return what a property gives."""
        return self.results.of(found.fget, Given((owner,), is_all=True))

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
                yield self._again(code, around, frozenset(), cells, is_inner=True)

    def _again(
        self,
        code: types.CodeType,
        known: Mapping[str, Any],
        turned: frozenset[ast.expr],
        cells: Mapping[str, types.CellType],
        is_inner: bool,
    ) -> StillFrame:
        names = code, self.f_globals, known, turned, cells
        return StillFrame(*names, is_inner=is_inner, results=self.results)

    def turns(self) -> Iterator[StillFrame]:
        """Yield the function in each turn of its loops, as far as it is known what they run
        over."""
        frame = Frame(self, {}, None)  # type: ignore[arg-type]
        for target, over in loops_of(self.f_code):
            if target in self._turned:  # whether or not its member is known
                continue
            turned = self._turned | {target}
            members = or_unknown(functools.partial(members_of, frame), over)
            for member in () if members is UNKNOWN else some_of(members):
                new = {n: value for n, value in bound_by(target, member) if value is not UNKNOWN}
                if new:  # else it is what it was, turn after turn
                    known = {**self.f_locals, **new}
                    yield self._again(self.f_code, known, turned, self.f_cells, self.is_inner)

    def set_anew(self) -> Iterator[StillFrame]:
        """Yield the function with another object as a local variable that it sets to several."""
        frame = Frame(self, {}, None)  # type: ignore[arg-type]
        for name, expression in assignments_of(self.f_code):
            value = or_unknown(frame.bound, expression)
            is_plain = value is UNKNOWN or isinstance(value, (*_NUMBERS, Tensor))
            if expression not in self._turned and not is_plain:
                known, turned = {**self.f_locals, name: value}, self._turned | {expression}
                yield self._again(self.f_code, known, turned, self.f_cells, self.is_inner)


def spread(
    first: StillFrame, others: Callable[[StillFrame], Iterable[StillFrame]]
) -> Iterator[StillFrame]:
    """Yield a function and what it leads to. Loops that follow each other multiply, so that there
    is a limit for all of them, and single turns come first; a turn in which each name is what it
    was before is left out."""
    frames, kept = deque([first]), {first.named(): first}  # which keep what is named
    while frames:
        still = frames.popleft()
        yield still
        for one in others(still):
            if len(kept) >= _MOST_FRAMES:
                break
            if kept.setdefault(one.named(), one) is one:
                frames.append(one)


@dataclass(frozen=True)
class Given:
    """The arguments of a call.

    Attributes:
        first: by position.
        last: by position, behind those of a ``*args`` that nobody knows.
        named: by keyword.
        is_all: whether the call gives nothing else.
    """

    first: tuple[Any, ...] = ()
    last: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    is_all: bool = False

    @classmethod
    def by(cls, call: ast.Call, frame: Frame) -> Given:
        """Return what a call in a frame gives."""
        by_position = [*_spread(call.args, frame)]
        at = next((i for i, one in enumerate(by_position) if one is _REST), None)
        named = dict[str, Any]()
        for keyword in call.keywords:
            value = or_unknown(frame.bound, keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= {key: member for key, member in value.items() if isinstance(key, str)}
        is_spread = any(keyword.arg is None for keyword in call.keywords)
        last = () if at is None else tuple(one for one in by_position[at:] if one is not _REST)
        return cls(tuple(by_position[:at]), last, named, is_all=at is None and not is_spread)

    def behind(self, *first: Any) -> Given:
        """Return the same with others in front of it, such as a method's object."""
        return Given((*first, *self.first), self.last, self.named, self.is_all)

    def with_named(self, named: Mapping[str, Any]) -> Given:
        """Return the same with others by keyword, which it may replace."""
        return Given(self.first, self.last, {**named, **self.named}, self.is_all)

    def of_partial(self) -> Given:
        """Return what ``functools.partial``, given all this, gives a function."""
        return Given(self.first[1:], self.last, self.named)

    def by_identity(self) -> Hashable:
        """Return what is equal for two calls that give the same objects."""
        named = sorted((name, id(value)) for name, value in self.named.items())
        return (*map(id, self.first), "*", *map(id, self.last), *named)

    def by_name(self, function: types.FunctionType) -> dict[str, Any]:
        """Return the arguments of a method, without its object, by their names."""
        names = function.__code__.co_varnames[1:]
        return {**dict(zip(names, self.first, strict=False)), **self.named}

    def to(
        self, function: types.FunctionType, results: Results | None = None, *, is_first: bool
    ) -> StillFrame:
        """Return the frame of a function that is called so.

        Args:
            function: the function.
            results: what other calls give; by default nothing is known yet.
            is_first: whether autograd, or a step, calls it, and not the user's code.
        """
        code, known = function.__code__, dict[str, Any]()
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # it is set later
                known[name] = cell.cell_contents
        names = code.co_varnames[: code.co_argcount]
        all_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        defaults = function.__defaults__ or ()
        by_default = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        by_default.update(function.__kwdefaults__ or {})
        # Autograd passes nothing beside the gradients. Who calls others may pass another number,
        # but hardly another object (``lambda x, net=net: …``).
        is_known = is_first or self.is_all
        known |= {k: v for k, v in by_default.items() if is_known or not isinstance(v, _NUMBERS)}
        if self.last:
            known.update(zip(names[-len(self.last) :], self.last, strict=False))
        known.update(zip(names, self.first, strict=False))
        known |= {name: value for name, value in self.named.items() if name in all_names}
        others = [*code.co_varnames[len(all_names) :]]
        if code.co_flags & inspect.CO_VARARGS:
            rest = others.pop(0)
            if not is_first or len(self.first) > len(names):
                known[rest] = (*self.first[len(names) :], *self.last)
        if code.co_flags & inspect.CO_VARKEYWORDS:
            known[others[0]] = {k: v for k, v in self.named.items() if k not in all_names}
        return StillFrame(code, function.__globals__, known, cells=cells, results=results)


class Context(types.SimpleNamespace):
    """What stands for the context of a custom function, which each application has anew."""


class Results:
    """What calls give to code that does not run."""

    def __init__(self) -> None:
        self._known = dict[Hashable, tuple[Any, Given]]()  # which keep the objects that are named
        self._functions = dict[Hashable, tuple[types.FunctionType, Any]]()
        self._depth = 0

    def of(self, called: Any, given: Given) -> Any:
        """Return what a function of the user's returns, if it is one object, or an object like the
        one that a class of the user's makes; ``UNKNOWN`` for others.

        Args:
            called: the function, a method, or the class.
            given: what it is given.
        """
        if isinstance(called, staticmethod):
            called = called.__func__
        if isinstance(called, types.MethodType):
            called, given = called.__func__, given.behind(called.__self__)
        if not isinstance(called, types.FunctionType | type) or not is_users(called.__module__):
            return UNKNOWN
        key = id(called), given.by_identity()
        if key not in self._known:
            if self._depth >= _MOST_DEEP or len(self._known) >= _MOST_RESULTS:
                return UNKNOWN
            self._known[key] = UNKNOWN, given  # of itself
            self._depth += 1
            try:
                if isinstance(called, type):
                    found = self._made(called, given)
                else:
                    found = self._returned(called, given)
                self._known[key] = found, given
            finally:
                self._depth -= 1
        return self._known[key][0]

    def function(
        self,
        code: types.CodeType,
        names: dict[str, Any],
        defaults: tuple[Any, ...],
        cells: tuple[types.CellType, ...],
        around: Mapping[str, Any],
    ) -> types.FunctionType:
        """Return a function with some code; the same one for the same variables around it.

        Args:
            code: the code.
            names: the global variables of its module.
            defaults: of its last arguments.
            cells: the variables around it.
            around: what these stand for, by name.
        """
        key = id(code), *((name, id(value)) for name, value in sorted(around.items()))
        if key not in self._functions:
            made = types.FunctionType(code, names, code.co_name, defaults, cells)
            self._functions[key] = made, around
        return self._functions[key][0]

    def _returned(self, function: types.FunctionType, given: Given) -> Any:
        code = function.__code__
        returned = returned_by(code)
        if code.co_flags & STOPS or not returned:
            return UNKNOWN
        parts = (part for node in returned for part in ast.walk(node))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(len(sources_of(code, name)) > (name not in parameters) for name in names):
            return UNKNOWN  # it may be one of several
        still = given.to(function, self, is_first=False)
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        first, *others = [or_unknown(frame.bound, node) for node in returned]
        return first if all(one is first for one in others) else UNKNOWN

    def _made(self, kind: type, given: Given) -> Any:
        """Return an object with the attributes that its ``__init__`` sets, which does not run; or
        the one that a class has for all."""
        new, init = attribute_in(kind, "__new__"), attribute_in(kind, "__init__")
        fields = attribute_in(kind, "_fields")
        if issubclass(kind, tuple) and isinstance(fields, tuple):  # a named one
            named = {**dict(zip(fields, given.first, strict=False)), **given.named}
            return tuple.__new__(kind, [named.get(name, UNKNOWN) for name in fields])
        call = attribute_in(type(kind), "__call__")
        for method in (call, getattr(new, "__func__", new)):
            if isinstance(method, types.FunctionType) and is_users(method.__module__):
                return self.of(method, given.behind(kind))
        is_ended = attribute_in(kind, "__del__") is not UNKNOWN  # by code of the user's
        if not makes_new(kind) or is_ended:
            return UNKNOWN
        made: Any = object.__new__(kind)
        if isinstance(made, nn.Module):
            nn.Module.__init__(made)
        space = own_attributes(made)
        if not isinstance(init, types.FunctionType):
            return made
        is_data = attribute_in(kind, "__dataclass_fields__") is not UNKNOWN
        if is_data and not accesses_of(init.__code__):
            space.update(given.by_name(init))
            return made
        self._fill(space, made, given.behind(made).to(init, self, is_first=False))
        return made

    def context_of(self, kind: Any, given: Given) -> Any:
        """Return an object with what the forward of a custom function sets in its context.

        Args:
            kind: the custom function.
            given: what it is applied to.
        """
        key = id(kind), "context", given.by_identity()
        if key not in self._known:
            context = Context()
            self._known[key] = context, given
            sets_up = kind.setup_context is not torch.autograd.Function.setup_context
            method = kind.setup_context if sets_up else kind.forward
            known = Given((context, given.first)) if sets_up else given.behind(context)
            self._fill(vars(context), context, known.to(method, self, is_first=False))
        return self._known[key][0]

    @staticmethod
    def _fill(space: dict[str, Any], made: Any, still: StillFrame) -> None:
        """Set what a function sets as attributes of an object."""
        frame = Frame(still, {}, None)  # type: ignore[arg-type]
        found = list[tuple[ast.expr, Any]]()
        for accesses in accesses_of(still.f_code).values():
            for access in accesses:
                if access.writes and access.assigned is not None:
                    found.append((access.node, or_unknown(frame.bound, access.assigned)))
        for target, over in loops_of(still.f_code):
            members = or_unknown(functools.partial(members_of, frame), over)
            for member in [] if members is UNKNOWN else some_of(members)[:1]:
                found += set_by_turn(target, member)
        for node, value in found:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_own = or_unknown(frame.evaluated, node.value) is made
                space |= {node.attr: value} if is_own else {}


def _spread(nodes: list[ast.expr], frame: Frame) -> Iterator[Any]:
    for node in nodes:
        if not isinstance(node, ast.Starred):
            yield or_unknown(frame.bound, node)
            continue
        values = or_unknown(frame.evaluated, node.value)
        yield from values if isinstance(values, tuple | list) else (_REST,)


def chosen_among(node: ast.Subscript, frame: Frame) -> Iterator[Any]:
    """Yield what an index may choose: the members of a display, of a container, or of modules."""
    written = getattr(node.value, "values", getattr(node.value, "elts", ()))  # {"l1": self.l1}
    yield from (or_unknown(frame.bound, one) for one in written)
    table = or_unknown(frame.evaluated, node.value)
    if isinstance(table, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        table = children_of(table)
    if isinstance(table, list | tuple | dict):
        yield from some_of(table.values() if isinstance(table, dict) else table)


def some_of(members: Iterable[Any]) -> list[Any]:
    """Return all members, or as many as are looked at, from everywhere among them."""
    found = [*members]
    return found[:: len(found) // _MOST_TURNS + 1]


def or_unknown(look: Callable[[Any], Any], at: Any) -> Any:
    """Return what a look at something gives; ``UNKNOWN`` if that fails."""
    try:
        return look(at)
    except Exception:  # of an object that cannot be looked at
        return UNKNOWN
