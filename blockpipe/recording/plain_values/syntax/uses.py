"""The use that code makes of a value, by the expressions around it."""

import ast
import enum

from .effects import DOES_BOTH, FILLS, WRITES, name_called, registers_hook

_READS = frozenset(["get", "keys", "values", "items", "copy", "index", "count", "__getitem__"])
_COMPARES = ("count", "index", "remove")
_TAKES_KEY = (
    *("get", "pop", "setdefault", "move_to_end", "add", "discard", "remove"),
    *("__getitem__", "__setitem__", "__delitem__"),
)
_STORES = frozenset(
    ["append", "appendleft", "extend", "insert", "setdefault", "update", "put", "put_nowait"]
)
_SAYS = frozenset(
    [
        *("print", "debug", "info", "warning", "error", "critical", "exception", "log", "warn"),
        *("add_scalar", "add_scalars", "set_description", "set_postfix"),
    ]
)
PURE = frozenset(  # functions whose result has no other effect
    [
        *("abs", "bool", "dict", "float", "int", "len", "list", "max", "min", "round"),
        *("sorted", "str", "sum", "tuple"),
    ]
)
_MATCHED = ast.Name("<match>")  # no function: patterns read attributes
_SHOWN = ast.Name("str")
_SHOWS = ("str", "repr", "ascii", "format")


class Use(enum.Enum):
    """The use that code makes of a mutable value that it reads."""

    NONE = enum.auto()  # it is given another name, or handed to a function
    READ = enum.auto()
    WRITE = enum.auto()
    BOTH = enum.auto()

    @property
    def changes(self) -> bool:
        """Whether it changes the value."""
        return self in (Use.WRITE, Use.BOTH)


def use_of(node: ast.expr, outer: tuple[ast.AST, ...]) -> tuple[Use, ast.expr | None]:
    """Return the use of a value, and the function that takes it as an argument.

    Args:
        node: the expression.
        outer: the nodes around it, from the inside out.
    """
    around = outer[0] if outer else None
    if isinstance(around, ast.Attribute):
        is_called = is_function(outer)
        if not is_called and around.attr not in _READS | DOES_BOTH | WRITES:
            return Use.NONE, None  # an attribute of it, which is an access of its own
        if around.attr in DOES_BOTH:
            is_dropped = is_called and len(outer) > 2 and isinstance(outer[2], ast.Expr)
            return (Use.WRITE if is_dropped else Use.BOTH), None
        if around.attr in WRITES | FILLS:
            return Use.WRITE, None
        is_in_place = around.attr.endswith("_") and not around.attr.endswith("__")
        return (Use.BOTH if is_in_place else Use.READ), None
    if isinstance(around, ast.Subscript) and around.value is node:
        return Use.NONE, None  # an entry of it
    if isinstance(around, ast.keyword) and around.arg == "out":
        return Use.WRITE, None
    if _is_shown(node, outer):
        return Use.READ, _SHOWN
    if isinstance(around, ast.keyword) and around.arg is not None:
        around = outer[1]
    if isinstance(around, ast.Match):
        return Use.READ, _MATCHED
    if isinstance(around, ast.Call):
        if isinstance(around.func, ast.Name) and around.func.id == "next":
            return Use.NONE, None
        is_none = node is around.func or registers_hook(name_called(around))
        return (Use.NONE if is_none else Use.READ), around.func
    if isinstance(around, ast.Assign):
        is_alias = not any(isinstance(target, ast.Tuple | ast.List) for target in around.targets)
    elif isinstance(around, ast.Tuple):
        is_alias = _is_in_line(node, outer)
    else:
        is_alias = isinstance(around, ast.AnnAssign | ast.NamedExpr | ast.Expr)
    is_asked = isinstance(around, ast.Compare) and isinstance(around.ops[0], ast.Is | ast.IsNot)
    return (Use.NONE if is_alias or is_asked else Use.READ), None


def _is_in_line(node: ast.expr, outer: tuple[ast.AST, ...]) -> bool:
    """Return whether each member of a tuple is assigned on its own: ``self.a, self.b = a, b``."""
    match outer[:2]:
        case [ast.Tuple(elts=values), ast.Assign(targets=[ast.Tuple(elts=targets)])]:
            own = dict(zip(map(id, values), targets, strict=False)).get(id(node))
            is_plain = not any(isinstance(one, ast.Starred) for one in (*values, *targets))
            is_unpacked = isinstance(own, ast.Tuple | ast.List)
            return len(values) == len(targets) and is_plain and not is_unpacked
    return False


def _is_shown(node: ast.AST, outer: tuple[ast.AST, ...]) -> bool:
    """Return whether an expression is a part of a text: by its own, or in a tuple or list."""
    for around in outer:
        if isinstance(around, ast.BinOp):
            return isinstance(around.op, ast.Mod) and around.right is node
        if not isinstance(around, ast.Tuple | ast.List | ast.Starred | ast.keyword):
            return isinstance(around, ast.FormattedValue) or name_called(around) in _SHOWS
        node = around
    return False


def opened_by(node: ast.expr, outer: tuple[ast.AST, ...]) -> ast.AST | None:
    """Return what looks into the containers in a list without a name for them: a comparison, a
    method of the list's own that compares, a loop that unpacks them, or a function that is given
    each (``zip(*rows)``); ``None``: nothing does."""
    match outer[:2]:
        case [ast.Starred(), ast.Call(func=function)]:
            return function
        case [ast.Compare(ops=[ast.Is() | ast.IsNot(), *_]), *_]:
            return None
        case [ast.Attribute(attr=name), ast.Call()] if is_function(outer) and name in _COMPARES:
            return outer[0]
        case [ast.For(target=target, iter=over) | ast.comprehension(target=target, iter=over), *_]:
            return outer[0] if over is node and isinstance(target, ast.Tuple | ast.List) else None
        case [ast.Compare(), *_]:
            return outer[0]
    return None


def stored_in(node: ast.AST, outer: tuple[ast.AST, ...]) -> ast.expr | None:
    """Return what a value is put into as it is: a container's expression, or the one of an object
    whose attribute it becomes; ``None``: nothing. A hook that has it as a default keeps it too."""
    for around in outer:
        match around:
            case ast.Tuple() | ast.List() | ast.Dict() | ast.Starred() | ast.keyword():
                pass
            case ast.arguments() | ast.Lambda():
                pass
            case ast.Call(func=ast.Attribute(value=kept, attr=name)) if around.func is not node:
                is_hook = registers_hook(name) and isinstance(node, ast.Lambda)
                return kept if name in _STORES or is_hook else None
            case ast.Assign(targets=[ast.Attribute(value=kept) | ast.Subscript(value=kept)]):
                return kept
            case _:
                return None
        node = around
    return None


def is_function(outer: tuple[ast.AST, ...]) -> bool:
    """Return whether the innermost of the nodes is the function of a call."""
    call = outer[1] if len(outer) > 1 else None
    return isinstance(call, ast.Call) and call.func is outer[0]


def key_taken(node: ast.expr, outer: tuple[ast.AST, ...]) -> ast.expr | None:
    """Return the key of the one entry that code asks a container for, or changes:
    ``table.get(key)``, ``table.setdefault(key, [])``, ``table.update({key: 1})``."""
    match outer[:1]:
        case [ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[found])]:
            return key if found is node else None
    method, call = outer[:2] if len(outer) > 1 else (None, None)
    if not (isinstance(method, ast.Attribute) and isinstance(call, ast.Call)):
        return None
    if call.func is not method:
        return None
    if method.attr == "update":
        return _only_key(call)
    return call.args[0] if method.attr in _TAKES_KEY and call.args else None


def _only_key(call: ast.Call) -> ast.expr | None:
    """Return the key of the one entry that a dictionary is updated with."""
    match call.args, call.keywords:
        case [ast.Dict(keys=[key])], []:
            return key
        case [], [ast.keyword(arg=str(name))]:
            return ast.copy_location(ast.Constant(name), call)
    return None


def goes_back(node: ast.expr, outer: tuple[ast.AST, ...]) -> ast.expr | None:
    """Return the expression by which a value goes back to its place: ``self.n = self.n + 1``,
    ``self.n = max(self.n, x)``."""
    through = (
        *(ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare),
        *(ast.List, ast.Tuple, ast.Starred, ast.Subscript),
    )
    for around in outer:
        if isinstance(around, ast.Assign) and len(around.targets) == 1:
            same = ast.dump(around.targets[0]).replace("Store()", "Load()")
            return around.value if same == ast.dump(node) else None
        is_pure = isinstance(around, ast.Call) and getattr(around.func, "id", "") in PURE
        if not is_pure and not isinstance(around, through):
            return None
    return None


def is_said_in(outer: tuple[ast.AST, ...]) -> bool:
    """Return whether a value is only printed or logged."""
    if len(outer) < 2 or not isinstance(outer[-1], ast.Expr):
        return False
    return name_called(outer[-2]) in _SAYS
