"""Tell which expressions may have another value for a micro-batch of another size.

A recording on fake tensors sees one size. What follows from the data it never sees, for that would
have to be read; but ``x.size(0)`` is a number like any other one. So is ``max(lengths)`` of a list
that it is given: plain values of arguments count as sizes here.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ...._common.libraries import is_users
from ..syntax.accesses import Access, sources_of
from ..syntax.effects import arguments_of, name_called
from .callers import argument_of
from .expressions import Frame
from .members import ALL, UNKNOWN

_ASKS = frozenset(["size", "numel", "nelement", "stride", "__len__", "nbytes", "shape"])
_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict)

_Place = tuple[Any, Any]  # an object, and a name or key in it


class Known(Protocol):
    """The values that a forward has read and set, as far as it is asked here."""

    is_of_other_sizes: bool

    def turns(self, owner: Any, key: Any) -> bool: ...

    def may_set(self, owner: Any, key: Any) -> bool: ...


@dataclass(frozen=True)
class BySize:
    """How a write may follow from the sizes of a micro-batch.

    Attributes:
        key: whether these choose the entry.
        alone: whether the value is the same for each micro-batch of the same sizes.
    """

    key: bool
    alone: bool


class Sizes:
    """Questions about the expressions of a forward.

    Args:
        is_lasting: says whether an object was there before the forward.
        known: the values that the forward has read and set.
        fake: whether it runs on fake tensors; else each write may follow from the data.
    """

    def __init__(self, is_lasting: Callable[[Any], bool], known: Known, *, fake: bool) -> None:
        self._lasts, self._known, self._fake = is_lasting, known, fake
        self._given, self._forward = set[int](), None

    def given(self, function: Any, objects: Iterable[Any]) -> None:
        """Tell what each micro-batch has of its own.

        Args:
            function: the model's ``forward``, all of whose arguments are such.
            objects: the containers and objects in its arguments; the caller keeps them alive.
        """
        self._forward, self._given = getattr(function, "__code__", None), {*map(id, objects)}

    def _is_lasting(self, owner: Any) -> bool:
        return id(owner) not in self._given and self._lasts(owner)

    def _is_given(self, name: ast.Name, value: Any, frame: Frame) -> bool:
        """Whether a variable has what micro-batches of one step, and so of one recording, may have
        otherwise: no number or text, which all of them get, but a list of such, or an object."""
        if value is None or isinstance(value, Tensor | nn.Module | bool | int | float | str):
            return False
        names = frame.code.co_varnames[: frame.code.co_argcount + frame.code.co_kwonlyargcount]
        is_argument = frame.code is self._forward and name.id in names
        return is_argument or id(value) in self._given

    def write(self, access: Access, frame: Frame, owner: Any, key: Any) -> BySize | None:
        """Return how a write may follow from sizes; ``None`` if it does not.

        Args:
            access: the access that sets the value.
            frame: the frame that it is in.
            owner: the object that holds the value.
            key: the value's name or key there.
        """
        chooses = key is not ALL and self.choose_entry(access, frame)
        given = arguments_of(access.node) if access.assigned is None else [access.assigned]
        is_other = chooses or self._known.is_of_other_sizes
        if not is_other and not (self._fake and self.asked(given, frame)):
            return None
        alone = not access.counts and self._follow_alone(access.assigned, frame, (owner, key))
        return BySize(chooses, alone)

    def asked(
        self, nodes: Iterable[ast.AST], frame: Frame, *, surely: bool = False, seen: int = 0
    ) -> bool:
        """Return whether any expression may follow from sizes.

        Args:
            nodes: the expressions.
            frame: the frame that they are in.
            surely: whether a number of which nothing is known follows from none.
            seen: how many names were followed to what they are set to.
        """
        parts = (part for node in nodes for part in ast.walk(node))
        return any(self._follows(part, frame, surely, seen) for part in parts)

    def _follows(self, node: ast.AST, frame: Frame, surely: bool, seen: int) -> bool:
        if isinstance(node, ast.Call):
            return self._is_answer(node, frame, surely)
        if not isinstance(node, ast.Attribute | ast.Name):
            return False
        if isinstance(node, ast.Attribute) and node.attr in _ASKS:
            return not self._is_lasting(frame.evaluated(node.value))
        owner, key, value = frame.owner_of(Access(node, reads=True, writes=False))
        if owner is not None and self._is_lasting(owner):
            return self._known.turns(owner, key)
        if id(owner) in self._given:
            return True
        if isinstance(node, ast.Name) and self._is_given(node, value, frame):
            return True
        if not isinstance(value, _PLAIN) or self._is_lasting(value):
            return False
        if not surely or isinstance(node, ast.Attribute):
            return not surely and not _is_of_tensor(node, frame)
        return seen < 4 and any(  # a guess
            self.asked([source], where, surely=True, seen=seen + 1)
            for source, where in _sources(node.id, frame)
        )

    def _is_answer(self, call: ast.Call, frame: Frame, surely: bool) -> bool:
        """Whether a call may answer with something that follows from sizes."""
        name = name_called(call)
        if name in _ASKS:
            return True
        given = [frame.evaluated(argument) for argument in call.args]
        if name == "len":
            return not any(map(self._is_lasting, given))
        function = frame.evaluated(call.func)
        if isinstance(function, types.BuiltinFunctionType | type):
            return False  # but of its arguments
        is_library = function is not UNKNOWN and not is_users(
            type(function).__module__
            if isinstance(function, nn.Module)
            else getattr(function, "__module__", None) or "builtins"
        )
        takes_tensor = any(isinstance(one, Tensor) for one in given)
        return not is_library and (takes_tensor or not surely)

    def choose_entry(self, access: Access, frame: Frame) -> bool:
        """Return whether the key of the entry that an access is to may follow from sizes."""
        node = access.node
        key = node.slice if isinstance(node, ast.Subscript) else access.key
        return key is not None and self.asked([key], frame, surely=True)

    def _follow_alone(self, node: ast.expr | None, frame: Frame, place: _Place) -> bool:
        """Return whether what goes to a place follows from sizes, and from what the forward does
        not set, alone."""
        return node is not None and self._is_same(node, frame, place, 0)

    def _is_same(self, node: ast.expr, frame: Frame, place: _Place, seen: int) -> bool:
        if frame.evaluated(node) is UNKNOWN or seen > 4:  # a guess
            return False
        for part in ast.walk(node):
            branches = getattr(part, "values", [])
            if isinstance(part, ast.IfExp):
                branches = [part.body, part.orelse]
            if any(one is not None and frame.evaluated(one) is UNKNOWN for one in branches):
                return False
            if not isinstance(part, ast.Attribute | ast.Name):
                continue
            owner, key, value = frame.owner_of(Access(part, reads=True, writes=False))
            if owner is not None and self._is_lasting(owner):
                if (owner is place[0] and key == place[1]) or self._known.may_set(owner, key):
                    return False
            elif isinstance(part, ast.Name) and isinstance(value, _PLAIN):
                if self._is_given(part, value, frame):
                    continue
                sources = [*_sources(part.id, frame)]
                if not sources or not all(
                    self._is_same(source, where, place, seen + 1) for source, where in sources
                ):
                    return False
        return True


def _is_of_tensor(node: ast.expr, frame: Frame) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(frame.evaluated(node.value), Tensor)


def _sources(name: str, frame: Frame) -> Iterator[tuple[ast.expr, Frame]]:
    """Yield the expressions that a local variable's value comes out of, each with its frame: of an
    argument, that of the caller."""
    found = sources_of(frame.code, name)
    yield from ((value, frame) for value in found)
    value, where = (not found and argument_of(name, frame)) or (None, frame)
    if value is not None:
        yield value, where
