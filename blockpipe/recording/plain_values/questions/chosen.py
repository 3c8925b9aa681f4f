"""What an expression may stand for with other data: by a key, an index, a name or a condition."""

import ast
import enum
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...._torch.modules import children_of
from ..evaluation.expressions import Frame
from ..evaluation.members import UNKNOWN, own_attributes
from ..evaluation.still_frames import Given, Results, chosen_among, or_unknown, some_of
from ..known_values import KnownValues
from ..places import has_tensors
from ..still_code import frame_inside
from ..syntax.accesses import Access, returned_by, sources_of, tests_of
from ..syntax.contents import alternatives
from ..syntax.deciders import parts_of_results
from ..syntax.effects import CALLS_EACH, arguments_of, name_called
from ..syntax.uses import Use
from .open_questions import any_open
from .set_by_forwards import users_function

FUNCTIONS = (types.FunctionType, types.MethodType)
_GIVES_ENTRY = ("get", "pop", "setdefault")  # methods of dictionaries
_CHOOSES = (
    *("max", "min", "sorted", "next", "filter", "islice", "compress", "takewhile", "dropwhile"),
    *("zip", "enumerate", "reversed", "choice", "choices", "sample", "list", "tuple"),
)
"""Functions of Python that give some of what they are given."""
_MODULES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MOST_DEEP = 4  # of names that are followed to what they are set to: a guess
_PLAIN = (bool, int, float, str, bytes, enum.Enum, type(None))
_ANY = ast.Name("*", ast.Load())  # a key that nobody knows


class Choices:
    """The choices in the code of one forward.

    Args:
        known: what the forward sets.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known = known

    def objects(self, node: ast.expr, frame: Frame, deep: int = 0) -> Iterator[Any]:
        """Yield the objects that an expression may stand for with other data: functions, modules,
        or what holds values."""
        if deep > _MOST_DEEP:
            return
        match node:
            case ast.Subscript(slice=at):
                if self._is_open(at, frame):
                    yield from chosen_among(node, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                if any_open([test], frame, self._known):
                    yield from (or_unknown(frame.bound, one) for one in (body, orelse))
            case ast.Attribute(value=owner, attr=name):
                for one in self.objects(owner, frame, deep + 1):
                    yield or_unknown(frame.bound, ast.Attribute(ast.Constant(one), name))
            case ast.Call(func=ast.Attribute(value=table, attr=name), args=[at, *others]) if (
                name in _GIVES_ENTRY
            ):
                if self._is_open(at, frame):
                    yield from chosen_among(ast.Subscript(table, at), frame)
                    yield from (or_unknown(frame.bound, one) for one in others)
            case ast.Call():
                for one, name in self._named(node, frame):
                    yield or_unknown(frame.bound, ast.Attribute(ast.Constant(one), name))
                for kind in self.objects(node.func, frame, deep + 1):
                    if isinstance(kind, type):
                        yield Results().of(kind, Given.by(node, frame))
                yield from self._returned(node, frame)
                if name_called(node) in _CHOOSES and any_open([node], frame, self._known):
                    yield from _members_in(node, frame)
            case ast.Name():
                for source in sources_of(frame.code, node.id):
                    yield from self.objects(source, frame, deep + 1)

    def _returned(self, call: ast.Call, frame: Frame) -> Iterator[Any]:
        """Yield the objects that a function of the user's may return with other data, and those in
        lists that it may return."""
        function = users_function(call, frame)
        if function is None:
            return
        inner = frame_inside(function, Given.by(call, frame))
        returned = returned_by(inner.code)
        if any_open([*tests_of(inner.code), *returned], inner, self._known):
            for node in parts_of_results(inner.code, returned):
                yield or_unknown(inner.bound, node)
                if isinstance(node, ast.Subscript):
                    yield from chosen_among(node, inner)

    def _named(self, call: ast.Call, frame: Frame) -> Iterator[tuple[Any, str]]:
        """Yield an object, and names of it, that ``getattr`` may read which is given a text that
        begins with a known one."""
        name = getattr(call.func, "id", "")
        if name != "getattr" or len(call.args) < 2 or _is_fixed(call.args[1]):
            return
        if not any_open([call.args[1]], frame, self._known):
            return
        owner, begin = or_unknown(frame.evaluated, call.args[0]), _begin(call.args[1], frame)
        for source in _sources_or(call.args[1], frame):
            texts = (or_unknown(frame.evaluated, one) for one in alternatives(source))
            yield from ((owner, one) for one in texts if isinstance(one, str))
        if begin:
            kinds = type(owner).__mro__ if owner is not UNKNOWN else ()
            names = {*own_attributes(owner), *(name for kind in kinds for name in vars(kind))}
            yield from ((owner, name) for name in sorted(map(str, names)) if name.startswith(begin))

    def accesses(self, access: Access, frame: Frame) -> Iterator[Access]:
        """Yield the accesses that an access may be with other data."""
        node = access.node
        if access.key is not None and self._is_open(access.key, frame):  # ``seen.add(k)``
            keys = self._keys(access.key, frame)
            yield from (replace(access, key=ast.Constant(key)) for key in keys)
            yield from () if keys else [replace(access, key=None)]
        if access.use.changes:  # by a method: ``self.tables[k].clear()``
            held = self.objects(node, frame) if isinstance(node, ast.Subscript) else ()
            for one in held:
                yield replace(access, node=ast.copy_location(ast.Constant(one), node))
        found: Iterable[ast.Attribute | ast.Subscript] = ()
        match node:
            case ast.Attribute(value=owner, attr=name):
                held = self.objects(owner, frame)
                found = (ast.Attribute(ast.Constant(one), name, ast.Load()) for one in held)
            case ast.Subscript(value=table, slice=at):
                if self._is_open(at, frame):
                    yield from self._entries(access, table, self._keys(at, frame), frame)
                    return
                held = self.objects(table, frame)
                found = (ast.Subscript(ast.Constant(one), at, ast.Load()) for one in held)
            case ast.Call():
                named = self._named(node, frame)
                found = (ast.Attribute(ast.Constant(one), n, ast.Load()) for one, n in named)
        for one in found:
            if getattr(one.value, "value", None) is not UNKNOWN:
                yield Access(ast.copy_location(one, node), access.reads, access.writes)

    def _is_open(self, at: ast.expr, frame: Frame) -> bool:
        """Return whether a key or an index may be another one."""
        return not _is_fixed(at) and any_open([at], frame, self._known)

    def _keys(self, at: ast.expr, frame: Frame) -> list[Any]:
        """Return the keys that the data may choose; none, if nobody can tell."""
        keys = [*self.objects(at, frame)]
        return keys if all(isinstance(key, _PLAIN) for key in keys) else []

    def _entries(
        self, access: Access, table: ast.expr, keys: Sequence[Any], frame: Frame
    ) -> Iterator[Access]:
        """Yield the accesses to the entries that the data may choose: all, if nobody can tell. A
        tensor that one gets says itself of which micro-batch it is."""
        node = access.node
        for key in keys:
            one = ast.Subscript(table, ast.Constant(key), ast.Load())
            yield Access(ast.copy_location(one, node), access.reads, access.writes)
        if keys:
            return
        if access.reads:
            one = ast.Subscript(table, _ANY, ast.Load())
            yield Access(ast.copy_location(one, node), True, False)
        if access.writes and not has_tensors(frame.evaluated(table)):
            yield Access(table, True, False, use=Use.WRITE)

    def handed_on(self, call: ast.Call, frame: Frame) -> Iterator[Any]:
        """Yield the functions that a function of Python calls for each member of what the data
        choose: ``map(self.scale, hot)``."""
        if name_called(call) in CALLS_EACH and not self._known.fake:
            for given in arguments_of(call):
                if isinstance(function := or_unknown(frame.bound, given), FUNCTIONS):
                    yield function


def _members_in(call: ast.Call, frame: Frame) -> Iterator[Any]:
    """Yield the members of the containers that a call is given: ``max(zip(layers, scores))``."""
    given = arguments_of(call)
    names = (one for one in given if isinstance(one, ast.Name))
    behind = (source for name in names for source in sources_of(frame.code, name.id))
    for part in itertools.chain.from_iterable(map(ast.walk, (*given, *behind))):
        if isinstance(part, ast.Name | ast.Attribute):
            value = or_unknown(frame.evaluated, part)
            if isinstance(value, nn.Module):
                value = children_of(value) if isinstance(value, _MODULES) else {}
            if isinstance(value, list | tuple | dict):
                yield from some_of(value.values() if isinstance(value, dict) else value)


def _sources_or(node: ast.expr, frame: Frame) -> Sequence[ast.expr]:
    """Return what a variable is set to, or another expression."""
    return sources_of(frame.code, node.id) if isinstance(node, ast.Name) else [node]


def _is_fixed(at: ast.expr) -> bool:
    if isinstance(at, ast.Slice):
        return all(one is None or _is_fixed(one) for one in (at.lower, at.upper, at.step))
    return isinstance(at, ast.Constant)


def _begin(node: ast.expr, frame: Frame) -> str:
    """Return what a text begins with, as far as its code says it."""
    match node:
        case ast.JoinedStr(values=[ast.Constant(value=str(begin)), *_]):
            return begin
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod()):
            found = or_unknown(frame.evaluated, left)
            return found.partition("%")[0] if isinstance(found, str) else ""
        case ast.Name():
            begins = [_begin(source, frame) for source in sources_of(frame.code, node.id)]
            return begins[0] if len(begins) == 1 else ""
    return ""
