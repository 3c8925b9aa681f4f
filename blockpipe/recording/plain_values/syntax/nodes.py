"""The expressions of the file that a function is in, parsed once."""

import ast
import dis
import functools
import re
import types
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ...._common.code import parsed, source_of
from .bindings import assigned, bound, captured, filled, stored
from .branches import Condition, Turn, conditions_in, loops_in, tests_in, turns_in
from .effects import name_called
from .uses import is_said_in


class ImportedModule(ast.Constant):
    """The module of ``from module import name``; its value is the name, with the dots before it."""


class Imported(ast.Attribute):
    """What ``from module import name`` reads."""


Node = ast.Attribute | ast.Subscript | ast.Name | ast.Call
_FORMATS = frozenset(["str", "repr", "format", "int", "float", "round", "bool"])
Span = tuple[int | None, int | None, int | None, int | None]  # of dis.Positions
Place = tuple[Node, tuple[ast.AST, ...]]  # an expression, and what is around it

_LOADS_TWO = re.compile("_FAST(_BORROW)?_LOAD_FAST")


@dataclass
class Nodes:
    """The expressions of a file.

    Attributes:
        by_end: by its end, each expression and the nodes around it from the inside out.
        on_line: the names, by the line that they are on.
        tests: the conditions of branches and loops.
        conditions: those of them that code depends on.
        turns: what else decides which code runs: loops, and errors that are caught.
        assignments: the names that are set to an expression, in their order.
        loops: the targets of loops, comprehensions too, with what they run over; also of what
            binds names as one turn of a loop does.
        captures: the names that anything binds, with the expression that the value comes out of.
        sources: those names among them that it sets itself.
        fillings: the names of objects in which it sets something, with such expressions.
        contexts: what ``with`` statements enter.
        notes: the statements that only print or log, or only make a text or a number for an
            attribute: their first and last positions, and its name.
        containers: by their ends, the containers in which members are looked for.
        runs_over: what loops run over, by where an instruction of theirs says it is: at the whole
            loop, and from 3.12 on at what it runs over.
    """

    by_end: dict[tuple[int | None, int | None], list[Place]]
    on_line: dict[int | None, list[tuple[ast.Name, tuple[ast.AST, ...]]]]
    tests: list[ast.expr] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    assignments: list[tuple[str, ast.expr]] = field(default_factory=list)
    loops: list[tuple[ast.expr, ast.expr]] = field(default_factory=list)
    captures: list[tuple[str, ast.expr]] = field(default_factory=list)
    sources: list[tuple[str, ast.expr]] = field(default_factory=list)
    fillings: list[tuple[str, ast.expr]] = field(default_factory=list)
    contexts: list[ast.expr] = field(default_factory=list)
    notes: list[tuple[tuple[int, int], tuple[int, int], str]] = field(default_factory=list)
    containers: dict[tuple[int | None, int | None], ast.expr] = field(default_factory=dict)
    returned: dict[tuple[int | None, int | None], ast.expr] = field(default_factory=dict)
    runs_over: dict[Span, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))

    def of(self, instruction: dis.Instruction) -> list[Place]:
        """The expressions that end where an instruction says it is, and the second variable of
        those that load two (from 3.13 on), which say where the first one is."""
        positions = instruction.positions
        assert positions is not None
        line, column = positions.end_lineno, positions.end_col_offset
        found = self.by_end.get((line, column), [])
        if not _LOADS_TWO.search(instruction.opname):
            return found
        second = [place for place in self.on_line[line] if place[0].id == instruction.argval[1]]
        second.sort(key=lambda place: abs(place[0].col_offset - (column or 0)))
        return [*found, *second[:1]]


def span_of(node: ast.AST) -> Span:
    """Return where an expression or a statement is, as the instructions of its code say it."""
    part: Any = node
    return part.lineno, part.end_lineno, part.col_offset, part.end_col_offset


def lines_of(code: types.CodeType) -> set[int]:
    """Return the lines of a function's code."""
    return {line for _, _, line in code.co_lines() if line is not None}


def nodes_of(code: types.CodeType) -> Nodes:
    """Return the expressions of the file that a function's code is in."""
    return _nodes_in(source_of(code))


@functools.lru_cache(64)
def _nodes_in(source: str) -> Nodes:
    found = Nodes(defaultdict(list), defaultdict(list))
    try:
        level: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(parsed(source), ())]
    except (SyntaxError, ValueError):
        return found
    while level:
        node, outer = level.pop()
        if isinstance(node, Node):
            found.by_end[node.end_lineno, node.end_col_offset].append((node, outer))
            if isinstance(node, ast.Name):
                found.on_line[node.lineno].append((node, outer))
        elif isinstance(node, ast.ImportFrom):
            module = ImportedModule("." * node.level + (node.module or ""))
            read = (Imported(module, alias.name, ast.Load()) for alias in node.names)
            at = found.by_end[node.end_lineno, node.end_col_offset]
            at += ((ast.copy_location(one, node), (node,)) for one in read)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.In | ast.NotIn):
            found.containers[node.end_lineno, node.end_col_offset] = node.comparators[-1]
        elif isinstance(node, ast.Return) and node.value is not None:
            found.returned[node.end_lineno, node.end_col_offset] = node.value
        for loop in loops_in(node):
            for around in (node, loop):
                found.runs_over[span_of(around)].append(loop)
        found.tests += tests_in(node)
        found.conditions += conditions_in(node)
        found.turns += turns_in(node)
        found.assignments += assigned(node)
        found.loops += bound(node)
        found.captures += captured(node)
        found.sources += stored(node)
        found.fillings += filled(node)
        if isinstance(node, ast.withitem):
            found.contexts.append(node.context_expr)
        if isinstance(node, ast.Expr | ast.Assign) and (name := _noted_as(node)) is not None:
            end = node.end_lineno or node.lineno, node.end_col_offset or 0
            found.notes.append(((node.lineno, node.col_offset), end, name))
        # No question reaches beyond a statement.
        inner = (node,) if isinstance(node, ast.stmt) else (node, *outer)
        level += ((child, inner) for child in ast.iter_child_nodes(node))
    found.assignments.sort(key=lambda one: (one[1].lineno, one[1].col_offset))
    return found


def _noted_as(node: ast.Expr | ast.Assign) -> str | None:
    if isinstance(node, ast.Expr):
        return "" if is_said_in((node.value, node)) else None
    (target, *others), calls = node.targets, [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    named = map(name_called, calls)
    is_note = isinstance(target, ast.Attribute) and not others and _FORMATS.issuperset(named)
    return target.attr if is_note and isinstance(target, ast.Attribute) else None
