"""What the targets of loops and unpackings get."""

import ast
from collections.abc import Iterator
from typing import Any

from .members import UNKNOWN


def bound_by(target: ast.expr, member: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names in a loop's target, with their values in a turn.

    Args:
        target: the target.
        member: what the loop gives in that turn.
    """
    found = set_by_turn(target, member)
    yield from ((one.id, value) for one, value in found if isinstance(one, ast.Name))


def set_by_turn(target: ast.expr, member: Any) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the same with the expressions that are set: names, attributes and entries."""
    if isinstance(target, ast.Starred):
        yield from set_by_turn(target.value, member)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner, value in zip(target.elts, _unpacked(target.elts, member), strict=True):
            yield from set_by_turn(inner, value)
    else:
        yield target, member


def _unpacked(targets: list[ast.expr], member: Any) -> list[Any]:
    """Return what each target of an unpacking gets."""
    values = [*member] if type(member) in (list, tuple) else []
    at = next((i for i, one in enumerate(targets) if isinstance(one, ast.Starred)), None)
    if at is not None and len(values) >= len(targets) - 1:
        end = len(values) - (len(targets) - at - 1)
        values = [*values[:at], values[at:end], *values[end:]]
    return values if len(values) == len(targets) else [UNKNOWN] * len(targets)
