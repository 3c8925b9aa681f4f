"""What a variable's content, and whether a lambda runs, follow from beside assignments."""

import ast
import functools
import itertools
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from .accesses import Access, accesses_of, branches_of, calls_of, conditions_of, sources_of
from .branches import ends_loop, is_in
from .contents import alternatives
from .effects import CALLS_EACH, CHANGES_GIVEN, DOES_BOTH, WRITES, arguments_of, name_called
from .nodes import lines_of, nodes_of


@functools.lru_cache(10_000)
def fills(code: types.CodeType, name: str) -> list[ast.expr | ast.stmt]:
    """Return what the content of a function's local variable follows from, or which of several
    values it has: what methods and entries put into it, and the conditions and loops around."""
    found, own = list[ast.expr | ast.stmt](), sources_of(code, name)
    is_given = name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    nodes, lines = nodes_of(code), lines_of(code)
    sets = () if is_given else nodes.fillings  # of an argument, each attribute for itself
    puts = [value for known, value in sets if known == name and value.lineno in lines]
    for call in calls_of(code):
        function, given = call.func, arguments_of(call)
        owner = getattr(function, "value", None)
        if getattr(owner, "id", None) == name and name_called(call) in WRITES | DOES_BOTH:
            puts += given or [call]
        elif name_called(call) in CHANGES_GIVEN and name in (getattr(a, "id", "") for a in given):
            puts += [*given, call]
    several = own if len(own) > 1 or is_given else []
    if several:  # how often a loop sets it, its end says
        found += ends_of_loops(code)
    for put in (*puts, *several):
        found += (c.test for c in conditions_of(code) if c.asked_for(put) is not None)
        found += (
            by for turn in branches_of(code) if turn.is_loop and turn.has(put) for by in turn.by
        )
    return [*puts, *found]


@functools.lru_cache(10_000)
def ends_of_loops(code: types.CodeType) -> list[ast.expr]:
    """Return the conditions by which a function's code leaves its loops."""
    loops = branches_of(code)
    return [one.test for one in conditions_of(code) if ends_loop(one, loops)]


@functools.lru_cache(10_000)
def written_sources(code: types.CodeType, name: str) -> list[ast.expr]:
    """Return what a function's local variable is set to; ``a if c else b`` once, as it is
    written."""
    found = sources_of(code, name)
    parts = [[*alternatives(one)] for one in found]
    return [one for one in found if not (isinstance(one, ast.List) and one.elts in parts)]


def parts_of_results(
    code: types.CodeType, returned: Iterable[ast.expr]
) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions that a function's result may be, and those in a list that it makes."""
    todo: list[Any] = [*returned]
    seen = set[str]()
    while todo:
        match node := todo.pop():
            case ast.Name(id=name):
                todo += () if name in seen else [*sources_of(code, name), *fills(code, name)]
                seen.add(name)
                yield node
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                todo += parts
            case ast.Starred(value=part):
                todo.append(part)
            case ast.BinOp(left=left, right=right):  # of two lists, or of a list and a count
                todo += [left, right]
            case ast.IfExp() | ast.BoolOp():
                todo += alternatives(node)
            case _:
                yield node


def is_handed_to_each(node: ast.expr, code: types.CodeType) -> bool:
    """Return whether an expression is in a lambda that a function of Python calls for each member
    of something: ``map(lambda …, items)``."""
    calls = [call for call in calls_of(code) if name_called(call) in CALLS_EACH]
    given = [one for call in calls for one in arguments_of(call) if isinstance(one, ast.Lambda)]
    return is_in(given, node)


def is_in_table(node: ast.expr, code: types.CodeType) -> bool:
    """Return whether an expression is in a lambda that an index may choose: ``{True: lambda …,
    False: lambda …}[k]``, also of a local variable."""
    accesses = itertools.chain.from_iterable(accesses_of(code).values())
    tables = [one.node.value for one in accesses if isinstance(one.node, ast.Subscript)]
    named = [sources_of(code, one.id) for one in tables if isinstance(one, ast.Name)]
    members = (
        member
        for table in (*tables, *itertools.chain.from_iterable(named))
        for member in getattr(table, "values", getattr(table, "elts", ()))
    )
    return is_in([one for one in members if isinstance(one, ast.Lambda)], node)


def is_missed(
    node: ast.expr,
    code: types.CodeType,
    accesses: Mapping[int, list[Access]],
    ran: Container[int],
    opened: Container[int],
) -> bool:
    """Return whether an expression is in a branch, or a loop, of which nothing has run."""
    for condition in conditions_of(code):
        side = condition.asked_for(node)
        if side is not None:
            sides = ((at, condition.asked_for(many[0].node)) for at, many in accesses.items())
            if not any(at in ran for at, other in sides if other is side):
                return True
    if is_handed_to_each(node, code) or is_in_table(node, code):
        return True
    for turn in branches_of(code):
        inside = turn.has if turn.is_loop else turn.handles
        if inside(node):
            body = [at for at, many in accesses.items() if inside(many[0].node)]
            if not any(at in ran for at in body):
                return any(at in opened for at in body) or not body
    return False
