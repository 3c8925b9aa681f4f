"""What decides, in a node of the syntax tree, which code runs."""

import ast
from collections.abc import Iterator


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


def turns_in(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield what else decides which code runs: what loops run over, and what may raise an error
    that is caught."""
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Try | ast.TryStar) and node.handlers:
        yield from node.body
