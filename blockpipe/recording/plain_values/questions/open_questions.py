"""Which questions of the user's code may have another answer for another micro-batch.

Where a forward runs on fake tensors it reads no data, so only what forwards set, and chance, can
decide. A forward that runs for real may ask its data on any way: there a question counts unless all
that it asks is known to be the same for all data.
"""

import ast
import enum
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..evaluation.callers import argument_of, is_bound_to_hook, is_called_from_outside
from ..evaluation.expressions import Frame, is_walker
from ..evaluation.members import UNKNOWN, attribute_in
from ..evaluation.still_frames import Given
from ..known_values import KnownValues
from ..still_code import frame_inside
from ..syntax.accesses import Access, calls_of, returned_by, sources_of, tests_of
from ..syntax.deciders import fills, written_sources
from ..syntax.effects import (
    ASKS_KIND,
    ASKS_SHAPE,
    ASKS_SIZE,
    COMPUTES,
    MAKES_BY_SIZE,
    OF_KINDS,
    OF_SHAPES,
    arguments_of,
    asked_for_values,
    name_called,
)
from .kinds_by_data import Kinds, is_tensor
from .set_by_forwards import is_kept, is_set, is_users_function, users_function
from .sizes_by_data import has_size_by_data

_SURE = (nn.Module, type, types.ModuleType, types.FunctionType, type(None))
_CONTAINERS = (list, tuple, dict, deque)
_GIVES_NUMBERS = ("int", "item", "tolist")
_MOST_DEEP = 8  # of names that are followed to what they are set to: a guess


def any_open(
    questions: Iterable[ast.AST], frame: Frame, known: KnownValues, *, calls: bool = True
) -> bool:
    """Return whether any expression may have another value for another micro-batch: by the data, or
    by what forwards set (``self.calls % 5 == 0``), also if a local variable has it.

    Args:
        questions: the expressions.
        frame: the frame that they are in.
        known: what the forward sets.
        calls: whether in a real run each call that asks for more than shapes counts.
    """
    return _Values(known, calls=calls and not known.fake).is_open(questions, frame)


def follows_from_set(questions: Sequence[ast.AST], frame: Frame, known: KnownValues) -> bool:
    """Return whether code asks for what forwards set, or draws, itself or for a local variable that
    it names.

    Args:
        questions: the code: expressions, or statements.
        frame: the frame that it is in.
        known: what the forward sets.
    """
    nodes = (node for one in questions for node in ast.walk(one))
    loads = (node for node in nodes if not isinstance(getattr(node, "ctx", None), ast.Store))
    if any(is_set(node, frame, known) for node in loads):
        return True
    return any(is_set(node, frame, known) for node in _behind(questions, frame))


class _Values:
    """Questions to the expressions of a forward.

    Args:
        known: what the forward sets, and whether it runs on fake tensors.
        calls: whether each call that asks for more than shapes counts.
    """

    def __init__(self, known: KnownValues, *, calls: bool) -> None:
        self._known = known
        self._calls, self._kinds = calls, Kinds(known, self)
        self._under_way = set[tuple[Any, ...]]()

    def is_open(self, questions: Iterable[ast.AST], frame: Frame) -> bool:
        """Return whether any expression may have another value for another micro-batch."""
        asked, known = [*questions], self._known
        for name in asked_for_values(asked):
            if is_tensor(name, frame) and (not known.fake or is_kept(name, frame)):
                return True
        if any(self.may_differ(node, frame) for node in asked):
            return True
        return follows_from_set(asked, frame, known)

    def may_differ(self, node: ast.AST, frame: Frame) -> bool:
        """Return whether an expression may have another value for another micro-batch of the same
        sizes."""
        match node:
            case ast.Constant():
                return False
            case ast.Lambda(args=given, body=body):  # ``max(layers, key=lambda i: scores[i])``
                own = {one.arg for one in ast.walk(given) if isinstance(one, ast.arg)}
                names = (part for part in ast.walk(body) if isinstance(part, ast.Name))
                return any(self.value_may_differ(one, frame) for one in names if one.id not in own)
            case ast.Name():
                return self._name_may_differ(node, frame)
            case ast.Attribute(value=owner, attr=name):
                if name in OF_KINDS:
                    return self._kinds.of_tensor_may_differ(owner, frame)
                if name in OF_SHAPES:
                    return self._size_may_differ(owner, frame)
                if is_set(node, frame, self._known) or self.may_differ(owner, frame):
                    return True
                return self._property_may_differ(node, frame)
            case ast.Call():
                return self._call_may_differ(node, frame)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]):
                return any(
                    self._identity_may_differ(*each, frame)
                    for each in ((left, right), (right, left))
                )
        return any(self.may_differ(part, frame) for part in ast.iter_child_nodes(node))

    def _identity_may_differ(self, node: ast.expr, other: ast.expr, frame: Frame) -> bool:
        """Whether it may differ which object an expression gives, that is compared with another."""
        if isinstance(other, ast.Constant) and other.value is not None:
            return self.value_may_differ(node, frame)  # one of two numbers, or texts
        is_variable = isinstance(node, ast.Name | ast.Call)
        return (self._kinds if is_variable else self).may_differ(node, frame)

    def _property_may_differ(self, node: ast.Attribute, frame: Frame) -> bool:
        """Whether what a property of the user's gives may differ, or whether an object is true."""
        owner, value = frame.evaluated(node.value), frame.evaluated(node)
        getter = getattr(attribute_in(type(owner), node.attr), "fget", None)
        methods = (attribute_in(type(value), name) for name in ("__bool__", "__len__"))
        return self._method_may_differ(getter, owner) or any(
            self._method_may_differ(method, value) for method in methods
        )

    def _method_may_differ(self, getter: Any, owner: Any) -> bool:
        """Whether what a method without arguments gives may differ."""
        key = getter, id(owner)
        if not is_users_function(getter) or key in self._under_way:
            return False
        self._under_way.add(key)
        try:
            inner = frame_inside(getter, Given((owner,), is_all=True))
            asked = [*tests_of(inner.code), *returned_by(inner.code)]
            return self.is_open(asked, inner)
        finally:
            self._under_way.discard(key)

    def _name_may_differ(self, node: ast.Name, frame: Frame) -> bool:
        owner, _, value = frame.owner_of(Access(node, reads=True, writes=False))
        if (outer := _around(node.id, frame)) is not None:
            return self._name_may_differ(node, outer) or is_set(node, frame, self._known)
        if owner is not None:
            return is_set(node, frame, self._known)
        if isinstance(value, Tensor):
            return False  # where it is asked for itself, the caller knows
        key = id(frame.code), node.id, id(frame.frame)
        if key in self._under_way or len(self._under_way) > _MOST_DEEP:
            return False
        self._under_way.add(key)
        try:
            sources = sources_of(frame.code, node.id)
            behind = (*sources, *_filled_with(node, frame))
            if any(self.value_may_differ(one, frame) for one in behind):
                return True
            return not sources and self._argument_may_differ(node.id, value, frame)
        finally:
            self._under_way.discard(key)

    def _argument_may_differ(self, name: str, value: Any, frame: Frame) -> bool:
        """Whether a variable that the code does not set itself may: but not an argument that the
        caller leaves out, or gives as a constant or another value that is the same."""
        if (given := argument_of(name, frame)) is not None:
            expression, caller = given
            return expression is not None and self.may_differ(expression, caller)
        code = frame.code
        is_operators = code.co_name.startswith("__") and name == code.co_varnames[0]  # its object
        is_known = is_operators or is_bound_to_hook(value, frame)
        if value is UNKNOWN or isinstance(value, _SURE) or is_known:
            return False
        if is_called_from_outside(frame):
            return isinstance(value, bool | int | float) and not self._known.fake
        return True

    def _call_may_differ(self, call: ast.Call, frame: Frame) -> bool:
        if is_set(call, frame, self._known):
            return True
        name, given, function = name_called(call), arguments_of(call), call.func
        of_method = [function.value] if isinstance(function, ast.Attribute) else []
        if name in ("getattr", "hasattr") and len(given) > 1:
            asked = given[1].value if isinstance(given[1], ast.Constant) else None
            if isinstance(asked, str):
                named = ast.Attribute(given[0], asked, ast.Load())
                if is_set(named, frame, self._known):
                    return True
                asks = self.may_differ if name == "getattr" else self._kinds.may_differ
                return asks(named, frame)
        if name in ASKS_SIZE:
            return any(self._size_may_differ(one, frame) for one in (*of_method, *given))
        if name == "get" and of_method and given:
            entry = ast.Subscript(of_method[0], given[0], ast.Load())
            if is_set(entry, frame, self._known) or self.may_differ(entry, frame):
                return True
            return any(self.may_differ(one, frame) for one in given)
        if name == "is_grad_enabled" and self._kinds.is_under_choice(frame):
            return True
        if name in ASKS_SHAPE:
            return any(self._kinds.may_differ(one, frame) for one in (*of_method, *given))
        if is_walker(frame.evaluated(function)):
            return any(self.may_differ(one, frame) for one in (*of_method, *given))
        is_text = any(isinstance(frame.evaluated(one), str) for one in of_method)
        if is_text or (name in COMPUTES and not of_method) or _computes(frame.bound(function)):
            return any(self.value_may_differ(one, frame) for one in given)
        return self._calls or any(self.may_differ(one, frame) for one in given)

    def value_may_differ(self, node: ast.AST, frame: Frame) -> bool:
        """Return the same where the values of tensors count, for which no forward on fake ones
        asks."""
        is_tensor = isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(
            frame.evaluated(node), Tensor
        )
        is_asked = is_tensor and (not self._known.fake or is_kept(node, frame))
        return is_asked or self.may_differ(node, frame)

    def _size_may_differ(self, node: ast.expr, frame: Frame) -> bool:
        """Whether the size of what an expression gives may be another one for other data, or
        because forwards set what it is (``self.bank = torch.cat([self.bank, h])``)."""
        value = frame.evaluated(node)
        if isinstance(value, Tensor) and has_size_by_data(value):
            return True
        match node:
            case ast.Name() if isinstance(value, Tensor):
                return self._size_of_name_may_differ(node, frame)
            case ast.Subscript(value=owner):
                return self._size_may_differ(owner, frame) or self._cuts_by_data(node, frame)
            case ast.Attribute() if isinstance(value, Tensor):
                return is_set(node, frame, self._known)
            case ast.Attribute():
                return self.may_differ(node, frame)
            case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name)), *_]):
                return self._size_may_differ(ast.Attribute(owner, name, ast.Load()), frame)
        return self.may_differ(node, frame)

    def _size_of_name_may_differ(self, node: ast.Name, frame: Frame) -> bool:
        key = id(frame.code), f"size of {node.id}", id(frame.frame)
        if key in self._under_way or len(self._under_way) > _MOST_DEEP:
            return False
        self._under_way.add(key)
        try:
            if self._kinds.is_one_of_several(node, frame):
                return True
            sources = written_sources(frame.code, node.id)
            given = argument_of(node.id, frame)
            if given is not None and given[0] is not None:
                sources, frame = [given[0]], given[1]
            return any(
                self._cuts_by_data(one, frame) or self._joins_set(one, frame) for one in sources
            )
        finally:
            self._under_way.discard(key)

    def _joins_set(self, node: ast.expr, frame: Frame) -> bool:
        """Whether an expression makes a tensor of one that forwards set, or is one."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute):
                value = frame.evaluated(part)
                if isinstance(value, Tensor) and self._size_may_differ(part, frame):
                    return True
                if isinstance(value, _CONTAINERS) and is_set(part, frame, self._known):
                    return True
        return False

    def _cuts_by_data(self, node: ast.expr, frame: Frame) -> bool:
        """Whether an expression makes a tensor as long as a mask, or a number of the data, says."""
        return any(self._cuts(part, frame) for part in ast.walk(node))

    def _cuts(self, part: ast.AST, frame: Frame) -> bool:
        if isinstance(part, ast.comprehension):
            return bool(part.ifs)
        if isinstance(part, ast.IfExp):
            return self.is_open([part.test], frame)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            sides = (part.left, part.right), (part.right, part.left)
            return any(
                isinstance(one, ast.List) and self.value_may_differ(count, frame)
                for one, count in sides
            )
        if isinstance(part, ast.Call):
            if name_called(part) in MAKES_BY_SIZE:
                return any(self.value_may_differ(one, frame) for one in arguments_of(part))
            if self._kinds.has_several_results(part, frame):
                return True
            given = itertools.chain.from_iterable(map(_members_of, arguments_of(part)))
            numbers = [one for one in given if _is_number(one, frame)]
            return name_called(part) in _GIVES_NUMBERS or any(
                self.may_differ(one, frame) for one in numbers
            )
        if not isinstance(part, ast.Subscript):
            return False
        ats = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
        return any(isinstance(at, ast.Compare) or self.value_may_differ(at, frame) for at in ats)


def _around(name: str, frame: Frame) -> Frame | None:
    """Return the frame of the function that has a running one's closure variable as its own."""
    found = frame.frame.f_back if frame.is_running and name in frame.code.co_freevars else None
    while found is not None and not (
        name in found.f_code.co_cellvars and frame.code in found.f_code.co_consts
    ):
        found = found.f_back
    return None if found is None else Frame(found, {}, None)


def _computes(function: Any) -> bool:
    """Return whether a function of the user's gives what follows from its arguments, and calls
    nothing that might ask others; or a class of enums or of frozen dataclasses does."""
    if isinstance(function, type):
        fixed = getattr(attribute_in(function, "__dataclass_params__"), "frozen", False)
        is_made = attribute_in(function, "__post_init__") is UNKNOWN
        return issubclass(function, enum.Enum) or (fixed and is_made)
    behind = getattr(function, "__func__", function)
    return is_users_function(behind) and all(
        isinstance(call.func, ast.Name) and call.func.id in (*COMPUTES, *ASKS_KIND)
        for call in calls_of(behind.__code__)
    )


def _members_of(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _is_number(node: ast.expr, frame: Frame) -> bool:
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node,)
    calls = (one for one in sides if isinstance(one, ast.Call))
    if any(users_function(one, frame) is not None for one in calls):
        return True  # or a tensor: nobody knows
    return isinstance(frame.evaluated(node), int | float)


def _behind(questions: Iterable[ast.AST], frame: Frame) -> Iterator[ast.AST]:
    """Yield the parts of what the local variables in expressions are set to, and so on, and of what
    they are filled with. That one is ``None``, or a certain object, says nothing of a count."""
    todo, seen = [*itertools.chain.from_iterable(map(_but_identity, questions))], set[str]()
    while todo:
        for part in ast.walk(todo.pop()):
            if isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                if is_tensor(part, frame):  # what is read of it is asked where it is read
                    continue
                sources = [*sources_of(frame.code, part.id), *_filled_with(part, frame)]
                todo += sources
                yield from (inner for one in sources for inner in ast.walk(one))


def _filled_with(name: ast.Name, frame: Frame) -> Iterable[ast.AST]:
    """Return what the content of a variable follows from, if it is one that has some."""
    value = frame.evaluated(name)
    return () if isinstance(value, _SURE) else fills(frame.code, name.id)


def _but_identity(question: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a condition that ask for more than which object it is, or of what kind."""
    match question:
        case ast.BoolOp() | ast.UnaryOp():
            for part in ast.iter_child_nodes(question):
                yield from _but_identity(part)
        case ast.Compare(ops=[ast.Is() | ast.IsNot(), *_]):
            return
        case ast.Compare(left=left, comparators=others):
            for part in (left, *others):
                yield from _but_identity(part)
        case ast.Attribute(attr=name) if name in OF_KINDS:
            return
        case ast.Call() if name_called(question) in ASKS_KIND:
            return
        case _:
            yield question
