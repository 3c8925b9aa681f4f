"""Find the names that a forward's code sets but never reads: timers, statistics, logged values.

A value that is only written does not affect the results, whichever micro-batch writes it first. The
code decides that and not a run, because a forward may read a name only in another branch. A read
whose value goes only to another such name (``self.seconds += clock() - self.began``) does not
count. If code has no source, or reads attributes by computed names, every name counts as read.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator

from torch import nn

from .._common.libraries import has_users_code, is_users
from ..restoring.model_state import names_in
from .plain_values.syntax.uses import PURE, Use, use_of

_THROUGH = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice),
    *(ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Starred, ast.FormattedValue, ast.JoinedStr),
)
# With these, code reads attributes without naming them.
_READERS = frozenset(
    ["vars", "eval", "exec", "globals", "locals", "attrgetter", "asdict", "astuple", "__dict__"]
)
_READS_FIELDS = re.compile(r"{[^{}:!]*[.\[]")  # "{0.n}".format(x)
_SAYS = frozenset(["__repr__", "__str__", "extra_repr"])  # text for people


class NamesRead:
    """The names that the user's code around a model reads.

    Args:
        objects: all objects that can be reached from the model; there may be duplicates.
        modules: the model's modules, whose classes may be a library's.
    """

    def __init__(self, objects: Iterable[object], modules: Iterable[nn.Module]) -> None:
        self._kinds = {type(module) for module in modules}
        found = {id(value): value for value in objects if isinstance(value, types.FunctionType)}
        self._functions = [
            function
            for function in found.values()
            if has_users_code(function) and function.__name__ not in _SAYS
        ]
        self._names = [mentioned(f.__code__) for f in self._functions]

    def is_unread(self, name: str, kind: type | None = None) -> bool:
        """Return whether no code reads an attribute or a variable of this name.

        Args:
            name: the name of the attribute or variable.
            kind: the class of the object that has the attribute; ``None`` for a variable.
        """
        if self._libraries_read(name, kind) or self._reads_any:
            return False
        if name in getattr(kind, "__match_args__", ()):  # by its place in a pattern
            return False
        return self._is_unread(name, frozenset(), is_variable=kind is None)

    def is_only_filled(self, name: str) -> bool:
        """Return whether code never reads the content of a container that only this name refers to:
        it only sets entries, or adds to it."""
        if self._libraries_read(name, None) or self._reads_any:
            return False
        return all(
            _only_fills(function, name)
            for function, names in zip(self._functions, self._names, strict=True)
            if name in names
        )

    def _libraries_read(self, name: str, kind: type | None) -> bool:
        """Return whether code of a library's module, or of the object's class, may read it."""
        kinds = self._kinds | ({kind} if kind is not None else set())
        return any(libraries_code_reads(one, name) for one in kinds)

    @functools.cached_property
    def _reads_any(self) -> bool:
        """Return whether any code reads attributes without naming them."""
        return any(reads_by_computed_names(function.__code__) for function in self._functions)

    def _is_unread(self, name: str, assumed: frozenset[str], *, is_variable: bool = False) -> bool:
        if name in assumed:
            return True
        return not any(
            self._reads(function, name, assumed | {name}, is_variable=is_variable)
            for function, names in zip(self._functions, self._names, strict=True)
            if name in names
        )

    def _reads(
        self, function: types.FunctionType, name: str, assumed: frozenset[str], *, is_variable: bool
    ) -> bool:
        tree = _tree_of(function)
        if tree is None:
            return True
        for node, outer in _walk(tree, ()):
            if isinstance(node, ast.Constant) and node.value == name:
                return True  # getattr(self, "name")
            if not _is_named(node, name) or (isinstance(node, ast.Name) and not is_variable):
                continue
            if isinstance(getattr(node, "ctx", None), ast.Load):
                target = _only_target(node, outer)
                if target is None or not self._is_unread(target, assumed):
                    return True
        return False


@functools.lru_cache(10_000)
def reads_by_computed_names(code: types.CodeType) -> bool:
    """Return whether a function reads attributes without naming them."""
    names = mentioned(code)
    if names & _READERS or ("format" in names and any(map(_READS_FIELDS.search, names))):
        return True
    tree = _tree_of(code) if "getattr" in names else None
    return "getattr" in names and (tree is None or not _asks_by_name(tree))


def libraries_code_reads(kind: type, name: object) -> bool:
    """Return whether the code that a class inherits from a library has a name."""
    return any(not is_users(b.__module__) and name in _names_of(b) for b in kind.__mro__)


def _only_fills(function: types.FunctionType, name: str) -> bool:
    tree = _tree_of(function)
    if tree is None:
        return False
    for node, outer in _walk(tree, ()):
        if isinstance(node, ast.Constant) and node.value == name:
            return False  # getattr(self, "name")
        is_read = isinstance(getattr(node, "ctx", None), ast.Load)
        if isinstance(node, ast.expr) and is_read and _is_named(node, name):
            around = outer[-1]
            sets_entry = (
                isinstance(around, ast.Subscript)
                and around.value is node
                and not isinstance(around.ctx, ast.Load)
            )
            if not sets_entry and use_of(node, outer[::-1])[0] is not Use.WRITE:
                return False
    return True


@functools.lru_cache(10_000)
def mentioned(code: types.CodeType) -> frozenset[str]:
    """Return the names and strings in a function and in the functions inside of it."""
    return frozenset(_mentions(code))


def _mentions(code: types.CodeType) -> Iterator[str]:
    yield from names_in(code)
    for inner in (code, *_inner(code)):
        yield from inner.co_freevars
        yield from inner.co_cellvars
        for constant in inner.co_consts:
            if isinstance(constant, str):
                yield constant


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)


@functools.cache
def _names_of(kind: type) -> frozenset[str]:
    """Return the names in the code of a class."""
    functions = (f for f in vars(kind).values() if isinstance(f, types.FunctionType))
    return frozenset(name for f in functions for name in mentioned(f.__code__))


def _tree_of(function: types.FunctionType | types.CodeType) -> ast.AST | None:
    return _tree_of_code(getattr(function, "__code__", function))  # reloads give it another one


@functools.cache
def _tree_of_code(code: types.CodeType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _walk(
    node: ast.AST, outer: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield every node with the nodes around it, from the outside in."""
    yield node, outer
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (*outer, node))


def _is_named(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Attribute):
        private = node.attr.startswith("__") and name.endswith(node.attr)
        return node.attr == name or private
    return isinstance(node, ast.Name) and node.id == name


def _asks_by_name(tree: ast.AST) -> bool:
    """Whether every ``getattr`` is called with a plain string."""
    plain = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    return all(
        id(node) in plain
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and _is_named(node, "getattr")
    )


def _only_target(node: ast.AST, outer: tuple[ast.AST, ...]) -> str | None:
    """Return the attribute that a value goes to, if it goes nowhere else; otherwise ``None``."""
    inner = node
    for around in reversed(outer):
        if isinstance(around, ast.Assign | ast.AugAssign):
            targets = around.targets if isinstance(around, ast.Assign) else [around.target]
            target = targets[0] if len(targets) == 1 else None
            return (
                target.attr if isinstance(target, ast.Attribute) and inner is around.value else None
            )
        is_pure = (
            isinstance(around, ast.Call)
            and isinstance(around.func, ast.Name)
            and around.func.id in PURE
            and inner is not around.func
        )
        if not is_pure and not isinstance(around, _THROUGH):
            return None
        inner = around
    return None
