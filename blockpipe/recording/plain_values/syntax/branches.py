"""What decides, in a node of the syntax tree, which code runs."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def tests_in(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions on which a node branches."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test
    elif isinstance(node, ast.BoolOp):
        yield from node.values[:-1]
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.Match):
        yield node.subject
        yield from (case.guard for case in node.cases if case.guard is not None)


def loops_in(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a loop, a comprehension, or ``yield from`` runs over."""
    if isinstance(node, ast.For | ast.AsyncFor):
        yield node.iter
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield from (one.iter for one in node.generators)
    elif isinstance(node, ast.YieldFrom):
        yield node.value


@dataclass(frozen=True)
class Condition:
    """A condition, and the code that runs if it is true, or if it is not."""

    test: ast.expr
    body: Sequence[ast.expr | ast.stmt]
    orelse: Sequence[ast.expr | ast.stmt] = ()

    def asked_for(self, node: ast.expr) -> bool | None:
        """Return what it has to be so that an expression runs; ``None``: it does not decide."""
        if is_in(self.body, node):
            return True
        return False if is_in(self.orelse, node) else None


def conditions_in(node: ast.AST) -> Iterator[Condition]:
    """Yield the conditions that decide about code inside of a node: its own, and those of the
    statements in it behind which others come only in one of both cases."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, ())
        for at, one in enumerate(statements if isinstance(statements, list) else ()):
            if isinstance(one, ast.If):
                rest = statements[at + 1 :]
                yield Condition(
                    one.test,
                    rest if _leaves(one.orelse) else (),
                    rest if _leaves(one.body) else (),
                )
    if isinstance(node, ast.If):
        yield Condition(node.test, node.body, node.orelse)
    elif isinstance(node, ast.IfExp):
        yield Condition(node.test, [node.body], [node.orelse])
    elif isinstance(node, ast.While):
        yield Condition(node.test, node.body)
    elif isinstance(node, ast.BoolOp):
        for at, one in enumerate(node.values[:-1]):
            rest = node.values[at + 1 :]
            is_or = isinstance(node.op, ast.Or)
            yield Condition(one, () if is_or else rest, rest if is_or else ())


def _leaves(statements: Sequence[ast.stmt]) -> bool:
    """Return whether no statement behind these runs."""
    last = statements[-1] if statements else None
    return isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break)


@dataclass(frozen=True)
class Turn:
    """What else decides which code runs: a loop, or an error that is caught.

    Attributes:
        by: what a loop runs over, or the statements that may raise the error.
        body: the statements that may not run, or not to their end.
        handlers: those that run after the error.
        caught: the kinds of errors; empty for all of them, and for loops.
        target: what a loop sets in each turn.
    """

    by: Sequence[ast.expr | ast.stmt]
    body: Sequence[ast.stmt] = ()
    handlers: Sequence[ast.ExceptHandler] = ()
    caught: Sequence[ast.expr] = ()
    is_loop: bool = False
    target: ast.expr | None = None

    def has(self, node: ast.expr) -> bool:
        """Return whether an expression is in the body."""
        return is_in(self.body, node)

    def handles(self, node: ast.expr) -> bool:
        """Return whether an expression is in a handler."""
        return is_in(self.handlers, node)


def ends_loop(condition: Condition, loops: Sequence[Turn]) -> bool:
    """Return whether a condition ends a loop that it is in, by ``break`` or ``return``.

    Args:
        condition: the condition.
        loops: the ``for`` loops of the function.
    """
    statements = (*condition.body, *condition.orelse)
    if any(isinstance(one, ast.Break) for one in statements):
        return True
    returns = any(isinstance(one, ast.Return) for one in statements)
    return returns and any(loop.is_loop and loop.has(condition.test) for loop in loops)


def turns_in(node: ast.AST) -> Iterator[Turn]:
    """Yield the loop or the caught errors of a node."""
    if isinstance(node, ast.comprehension):
        yield Turn([node.iter], is_loop=True)
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield Turn([node.iter], node.body, is_loop=True, target=node.target)
    elif isinstance(node, ast.Try | ast.TryStar) and node.handlers:
        kinds = [handler.type for handler in node.handlers if handler.type is not None]
        caught = kinds if len(kinds) == len(node.handlers) else ()
        yield Turn(node.body, [*node.body, *node.orelse], node.handlers, caught)
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
        for call in calls:
            if isinstance(call, ast.Call) and "suppress" in ast.unparse(call.func).split("."):
                yield Turn(node.body, node.body, (), call.args)


def is_in(parts: Sequence[ast.expr | ast.stmt | ast.ExceptHandler], node: ast.expr) -> bool:
    """Return whether an expression begins inside of any of some parts of the tree."""
    at = node.lineno, node.col_offset
    return any(
        (one.lineno, one.col_offset) <= at < (one.end_lineno or 0, one.end_col_offset or 0)
        for one in parts
    )
