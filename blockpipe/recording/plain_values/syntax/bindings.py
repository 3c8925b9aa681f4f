"""The names that a node of the syntax tree binds, and what to."""

import ast
from collections.abc import Iterable, Iterator, Sequence

from .contents import alternatives


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node sets to an expression, each with that."""
    for target, value in _assignments(node):
        pairs: Iterable[tuple[ast.expr, ast.expr]] = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=False)
        yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


def bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets that a loop sets in each turn, with what it runs over. Unpacking, a value
    that is one of several, and ``with`` do the same as a loop over those values."""
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, _over([node.context_expr])
    for target, value in _assignments(node):
        values = [*alternatives(value)]
        if isinstance(target, ast.Tuple | ast.List) or len(values) > 1:
            yield target, _over(values)


def captured(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield all names that a node binds, each with the expression that the value comes out of;
    also those that it only sets something in (``a.b = c``)."""
    for name, value, _ in _targets(node):
        yield name, value


def stored(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node binds itself, each with such an expression."""
    for name, value, part in _targets(node):
        if not isinstance(getattr(part, "ctx", None), ast.Load):
            yield name, value


def filled(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of objects in which a node sets an entry or an attribute, each with the
    expression that the value comes out of."""
    pairs = [*_assignments(node)]
    if isinstance(node, ast.AugAssign):
        pairs.append((node.target, node.value))
    for target, value in pairs:
        for one in target.elts if isinstance(target, ast.Tuple | ast.List) else (target,):
            root = one
            while isinstance(root, ast.Subscript | ast.Attribute):
                root = root.value
            if root is not one and isinstance(root, ast.Name):
                yield root.id, value


def _targets(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    pairs: list[tuple[ast.AST, ast.expr]] = [*_assignments(node)]
    pairs += [part for pair in bound(node) for part in _unpacked(*pair)]
    if isinstance(node, ast.AugAssign):
        pairs.append((node.target, node.value))
    if isinstance(node, ast.Match):
        pairs += [(case.pattern, node.subject) for case in node.cases]
    for target, value in pairs:
        for part in ast.walk(target):
            name = getattr(part, "id", None) or getattr(part, "name", None)
            name = name or getattr(part, "rest", None)
            if isinstance(name, str):
                yield name, value, part


def _unpacked(target: ast.expr, over: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the parts of what a loop sets in each turn, with what each runs over, as far as the
    code writes that down: ``for name, value in (("mean", x), ("most", y))``."""
    match target, over:
        case ast.Tuple(elts=[index, member]), ast.Call(func=ast.Name("enumerate"), args=[inner]):
            yield index, over
            yield from _unpacked(member, inner)
        case ast.Tuple(elts=[_, _]), ast.Call(func=ast.Attribute(ast.Dict() as table, "items")):
            columns = [one for one in table.keys if one is not None], table.values
            yield from _columns(target, over, columns)
        case ast.Tuple(elts=parts), ast.Tuple(elts=rows) | ast.List(elts=rows):
            tuples = [row for row in rows if isinstance(row, ast.Tuple)]
            if len(tuples) == len(rows) and {len(row.elts) for row in tuples} == {len(parts)}:
                yield from _columns(target, over, [*zip(*(t.elts for t in tuples), strict=True)])
            else:
                yield target, over
        case _:
            yield target, over


def _columns(
    target: ast.Tuple, over: ast.expr, columns: Sequence[Sequence[ast.expr]]
) -> Iterator[tuple[ast.expr, ast.expr]]:
    for part, column in zip(target.elts, columns, strict=True):
        yield from _unpacked(part, _over([*column]) if column else over)


def set_to(target: ast.expr, outer: tuple[ast.AST, ...]) -> ast.expr | None:
    """Return the expression that an attribute or an entry is set to, or comes out of.

    Args:
        target: the attribute or the entry.
        outer: the nodes around it, from the inside out, up to the statement.
    """
    for around in outer:
        if isinstance(around, ast.withitem):
            return around.context_expr
        if isinstance(around, ast.For | ast.AsyncFor | ast.comprehension):
            return around.iter
        if isinstance(around, ast.Assign | ast.AugAssign | ast.AnnAssign):
            value = around.value
            targets = around.targets if isinstance(around, ast.Assign) else ()
            pairs = (
                pair
                for one in targets
                if isinstance(one, ast.Tuple) and isinstance(value, ast.Tuple)
                for pair in zip(one.elts, value.elts, strict=False)
            )
            return next((own for one, own in pairs if one is target), value)
    return None


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
        yield node.target, node.value


def _over(values: list[ast.expr]) -> ast.expr:
    return ast.copy_location(ast.List(values, ast.Load()), values[0])
