"""Find the attribute, entry or variable that an instruction of the user's code reads or sets.

Bytecode has the order and the positions, but not the expressions. Those are looked up in the syntax
tree of the whole file, by the position at which each of them ends.
"""

import ast
import copy
import dis
import functools
import itertools
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .bindings import set_to
from .branches import Condition, Turn
from .contents import alternatives
from .effects import (
    ASKS_CHANCE,
    CHANGES,
    COPIES,
    SETS_TORCHS,
    SETTERS,
    name_called,
)
from .nodes import Imported, Node, lines_of, nodes_of, span_of
from .uses import (
    Use,
    goes_back,
    is_function,
    is_said_in,
    key_taken,
    opened_by,
    stored_in,
    use_of,
)

_OF_ENVIRONMENT = ("getenv", "getenvb")


@dataclass(frozen=True)
class Access:
    """One expression, at the instruction that evaluates it or assigns to it.

    Attributes:
        node: an attribute, a name, a subscript, or a call of ``getattr`` and the like.
        reads: whether it reads the value.
        writes: whether it sets or deletes the value.
        goes_back_by: the expression by which the value only goes back to the same place:
            ``self.n += 1``.
        use: the use that code makes of the value.
        given_to: the functions that take it as an argument.
        is_said: whether it is only printed or logged.
        key: of a container, the key of the entry that a method of it takes: ``table.pop(key)``.
        is_first: whether it is the first of the arguments.
        is_dropped: whether the result of the function that takes it is dropped.
        method: the name of the method of it that it is read for, which is called.
        is_call: whether it is a call of any function, whose value only the function tells.
        assigned: what a write sets the value to, or comes out of.
        stored_in: what the value is put into as it is.
        opened_by: what looks into the containers in it, without a name for them.
    """

    node: ast.expr
    reads: bool
    writes: bool
    goes_back_by: ast.expr | None = None
    use: Use = Use.READ
    given_to: ast.expr | None = None
    is_said: bool = False
    key: ast.expr | None = None
    is_first: bool = False
    is_dropped: bool = False
    method: str = ""
    is_call: bool = False
    assigned: ast.expr | None = None
    stored_in: ast.expr | None = None
    opened_by: ast.AST | None = None

    @property
    def calls(self) -> bool:
        """Whether it is read for a method of it, which is called."""
        return bool(self.method)

    @property
    def counts(self) -> bool:
        """Whether the value only goes back to the same place."""
        return self.goes_back_by is not None


@functools.lru_cache(1_000)
def accesses_of(code: types.CodeType) -> Mapping[int, list[Access]]:
    """Return the accesses of a function's code, by the offsets of its instructions.

    Args:
        code: the code. If its source is not available, there are none.
    """
    nodes = nodes_of(code)
    found = defaultdict[int, list[Access]](list)
    for instruction in _written_in(code) if nodes.by_end else ():
        operation = instruction.opname
        for node, outer in nodes.of(instruction):
            if any(name in operation for name in _INSTRUCTIONS[type(node)]):
                access = _access(node, outer, operation)
                if access is not None:
                    found[instruction.offset] += _each_alternative(access)
                    is_next = isinstance(node, ast.Call) and access.node is not node
                    if isinstance(node, ast.Call) and (is_next or asks_any_name(node)):
                        found[instruction.offset].append(_any_call(node, outer, access.is_said))
    return found


def _written_in(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code but for those that call ``__exit__`` at the end of a ``with``:
    the compiler gives them the place of the last call before."""
    nothing = 0  # how often in a row ``None`` was loaded
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("PRECALL", "CALL") and instruction.arg == 2 and nothing == 3:
            continue
        yield instruction
        is_nothing = instruction.opname == "LOAD_CONST" and instruction.argval is None
        nothing = nothing + 1 if is_nothing else 0


@functools.lru_cache(1_000)
def looked_into_again(code: types.CodeType) -> Mapping[int, list[Access]]:
    """Return what the loops of a function's code run over, by the offsets of the instructions that
    take the next element: it is looked into there, maybe on a later stage."""
    nodes, found = nodes_of(code), dict[int, list[Access]]()
    accesses = [a for many in accesses_of(code).values() for a in many if a.use is Use.READ]
    reads = {id(a): (a, span_of(a.node)) for a in accesses if a.reads and not a.writes}
    for instruction in dis.get_instructions(code) if nodes.by_end else ():
        if instruction.opname not in ("FOR_ITER", "SEND") or instruction.positions is None:
            continue
        looked_into = nodes.runs_over.get((*instruction.positions,), ())
        parts = {span_of(p) for n in looked_into for p in ast.walk(n) if isinstance(p, ast.expr)}
        inside = (access for access, span in reads.values() if span in parts)
        found[instruction.offset] = [a for a in inside if not (a.is_call and _sets(a.node))]
        if ".0" in code.co_varnames and looked_into:  # of a comprehension: an iterator
            given = ast.copy_location(ast.Name(".0", ast.Load()), looked_into[0])
            found[instruction.offset].append(Access(given, True, False))
    return found


def _sets(node: ast.expr) -> bool:
    return name_called(node) in CHANGES


def _each_alternative(access: Access) -> Iterator[Access]:
    """Yield an access for each object that it may be of: ``(a or b).k``."""
    if not isinstance(access.node, ast.Attribute | ast.Subscript):
        yield access
        return
    for owner in alternatives(access.node.value):
        node = copy.copy(access.node)
        node.value = owner
        yield access if owner is access.node.value else replace(access, node=node)


@functools.lru_cache(1_000)
def goes_to(code: types.CodeType, offset: int) -> str | None:
    """Return the attribute to which a text or a number that an instruction makes goes alone; an
    empty text if it is only printed or logged; ``None``: it may go anywhere."""
    line, _, column, _ = next(itertools.islice(code.co_positions(), offset // 2, None))
    where = line or 0, column or 0
    notes = nodes_of(code).notes
    return next((name for begin, end, name in notes if begin <= where < end), None)


def container_at(code: types.CodeType, offset: int) -> ast.expr | None:
    """Return the container in which an instruction looks for a member (``in``, ``not in``)."""
    if dis.opname[code.co_code[offset]] != "CONTAINS_OP":
        return None
    _, line, _, column = next(itertools.islice(code.co_positions(), offset // 2, None))
    containers = nodes_of(code).containers
    return containers.get((line, column))


def tests_of(code: types.CodeType) -> list[ast.expr]:
    """Return the conditions on which a function's code branches."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    return [test for test in nodes.tests if test.lineno in lines]


def conditions_of(code: types.CodeType) -> list[Condition]:
    """Return the conditions on which a function's code branches, with what depends on them."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    return [one for one in nodes.conditions if one.test.lineno in lines]


def turns_of(code: types.CodeType) -> list[ast.expr | ast.stmt]:
    """Return all that decides which of its instructions a function's code runs: conditions, what
    loops run over, and statements that may raise what it catches."""
    return [*tests_of(code), *(node for turn in branches_of(code) for node in turn.by)]


def branches_of(code: types.CodeType) -> list[Turn]:
    """Return the loops of a function's code, and the errors that it catches."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    return [turn for turn in nodes.turns if turn.by[0].lineno in lines]


def is_optional(node: ast.expr, code: types.CodeType) -> bool:
    """Return whether an expression of a function runs only for some data: in a branch, a loop, or
    where an error is caught."""
    conditions = (one.asked_for(node) is not None for one in conditions_of(code))
    return any(conditions) or any(one.has(node) or one.handles(node) for one in branches_of(code))


@functools.lru_cache(1_000)
def assignments_of(code: types.CodeType) -> Sequence[tuple[str, ast.expr]]:
    """Return the local variables that a function's code sets, each with what it is set to."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    own = {*code.co_varnames[code.co_argcount :], *code.co_cellvars}
    return [one for one in nodes.assignments if one[1].lineno in lines and one[0] in own]


@functools.lru_cache(1_000)
def names_bound(code: types.CodeType) -> frozenset[str]:
    """Return the local variables that a function's code sets, or that its loops do."""
    targets = (part for target, _ in loops_of(code) for part in ast.walk(target))
    looped = (part.id for part in targets if isinstance(part, ast.Name))
    return frozenset([*(name for name, _ in assignments_of(code)), *looped])


def captures_of(code: types.CodeType) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a function's code binds in any way, each with the expression that the
    value is, or comes out of."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    yield from ((name, value) for name, value in nodes.captures if value.lineno in lines)


@functools.lru_cache(10_000)
def sources_of(code: types.CodeType, name: str) -> list[ast.expr]:
    """Return the expressions that the values of a function's local variable come out of."""
    nodes = nodes_of(code)
    lines = lines_of(code)
    return [value for known, value in nodes.sources if known == name and value.lineno in lines]


@functools.lru_cache(1_000)
def returned_by(code: types.CodeType) -> Sequence[ast.expr]:
    """Return the expressions that a function returns; none, if it may return something else."""
    nodes, found = nodes_of(code), dict[int, ast.expr]()
    instructions = [*dis.get_instructions(code)]
    for before, instruction in itertools.pairwise(instructions):
        if instruction.opname.startswith("RETURN"):
            # A lambda's return is where the function begins.
            is_lambda = code.co_name == "<lambda>"
            at = before if is_lambda else instruction
            ends: list[ast.expr] = [one for one, outer in nodes.of(at) if _is_returned(one, outer)]
            if not is_lambda and (end := _end_of(at)) in nodes.returned:
                ends = [nodes.returned[end]]
            if not ends:
                return []
            found[id(ends[0])] = ends[0]
    return [*found.values()]


def _end_of(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    where = instruction.positions
    return (None, None) if where is None else (where.end_lineno, where.end_col_offset)


def _is_returned(node: ast.expr, outer: tuple[ast.AST, ...]) -> bool:
    around = outer[0] if outer else None
    is_body = isinstance(around, ast.Lambda) and around.body is node
    return is_body or isinstance(around, ast.Return)


def is_by_chance(value: ast.expr, code: types.CodeType) -> bool:
    """Return whether an expression in a function's code has another value in each forward, as a
    random number has, or the index of the micro-batch."""
    names = (part.id for part in ast.walk(value) if isinstance(part, ast.Name))
    parts = [value, *(source for name in names for source in sources_of(code, name))]
    return any(name_called(node) in ASKS_CHANCE for part in parts for node in ast.walk(part))


@functools.lru_cache(1_000)
def contexts_of(code: types.CodeType) -> frozenset[ast.expr]:
    """Return what the ``with`` statements of a function's code enter."""
    lines = lines_of(code)
    own = (context for context in nodes_of(code).contexts if context.lineno in lines)
    return frozenset(itertools.chain.from_iterable(map(alternatives, own)))


@functools.lru_cache(1_000)
def loops_of(code: types.CodeType) -> Sequence[tuple[ast.expr, ast.expr]]:
    """Return the targets of the loops in a function's code, each with what the loop runs over."""
    nodes = nodes_of(code)
    # By their columns too: a lambda may be on the line of the loop that hands it on.
    begins = {(line, column) for line, _, column, _ in code.co_positions()}
    own = {*code.co_varnames, *code.co_cellvars}
    return [
        (target, over)
        for target, over in nodes.loops
        if all(
            node.id in own and (node.lineno, node.col_offset) in begins
            for node in ast.walk(target)
            if isinstance(node, ast.Name)
        )
    ]


@functools.lru_cache(1_000)
def loops_by_name(code: types.CodeType) -> Mapping[str, Sequence[tuple[ast.expr, ast.expr]]]:
    """Return the loops of a function's code by the names that their targets bind."""
    found = defaultdict[str, list[tuple[ast.expr, ast.expr]]](list)
    for target, over in loops_of(code):
        for name in {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}:
            found[name].append((target, over))
    return dict(found)


@functools.lru_cache(1_000)
def calls_of(code: types.CodeType) -> Sequence[ast.Call]:
    """The calls in a function's code."""
    found = []
    nodes = nodes_of(code)
    for instruction in dis.get_instructions(code) if nodes.by_end else ():
        if "CALL" in instruction.opname:
            found += [node for node, _ in nodes.of(instruction) if isinstance(node, ast.Call)]
    return found


@functools.lru_cache(1_000)
def handed_on(code: types.CodeType) -> Sequence[ast.expr]:
    """Return what a function's code names and neither calls there nor takes anything of: it may be
    a function that is called later (``{True: self.a, False: self.b}[…](x)``)."""
    lines = lines_of(code)
    placed = (place for places in nodes_of(code).by_end.values() for place in places)
    loaded = (
        (node, outer)
        for node, outer in placed
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
    return [n for n, outer in loaded if n.lineno in lines and not _is_taken_apart(n, outer[:1])]


def _is_taken_apart(node: ast.expr, around: tuple[ast.AST, ...]) -> bool:
    """Whether code calls an expression there, or takes something of it."""
    return any(
        (isinstance(one, ast.Attribute | ast.Subscript) and one.value is node)
        or (isinstance(one, ast.Call) and one.func is node)
        for one in around
    )


_INSTRUCTIONS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Attribute: ("_ATTR", "LOAD_METHOD"),
    ast.Subscript: ("SUBSCR", "SLICE", "BINARY_OP"),
    ast.Name: ("_GLOBAL", "_NAME", "_DEREF", "CLASSDEREF", "_FAST"),
    ast.Call: ("CALL",),
    Imported: ("IMPORT_FROM",),
}


def _access(node: Node, outer: tuple[ast.AST, ...], operation: str) -> Access | None:
    is_said = is_said_in(outer)
    if isinstance(node, ast.Call):
        return _call(node, outer, is_said=is_said)
    if isinstance(node.ctx, ast.Load):
        use, given_to = use_of(node, outer)
        if use is Use.NONE and "_FAST" in operation:
            return None  # a local variable
        back, key = goes_back(node, outer), key_taken(node, outer)
        if key is not None and back is None:  # n[key] = n.get(key, 0) + 1
            back = goes_back(ast.Subscript(node, key, ast.Load()), outer[2:])
        is_first = given_to is not None and node in getattr(outer[0], "args", ())[:1]
        ends = len(outer) > 1 and isinstance(outer[1], ast.Expr)
        method = outer[0].attr if is_function(outer) and isinstance(outer[0], ast.Attribute) else ""
        found = node, True, False, back, use, given_to, is_said, key, is_first, ends, method
        opened = opened_by(node, outer)
        return Access(*found, stored_in=stored_in(node, outer), opened_by=opened)
    around = outer[0] if outer else None
    is_target = isinstance(around, ast.AugAssign) and node is around.target
    if "_FAST" in operation and not (is_target and "LOAD_FAST" in operation):
        return None  # but what a local variable names, ``+=`` may change
    back = around.value if isinstance(around, ast.AugAssign) and is_target else None
    # One instruction reads the value, and a later one sets it; if it is a container, it is
    # changed in place (``self.seen += [x]``).
    loads = operation.startswith(("LOAD", "BINARY")) or "LOAD_FAST" in operation
    use = Use.WRITE if is_target else Use.NONE
    return Access(node, loads, not loads, back, use, assigned=set_to(node, outer))


def _call(node: ast.Call, outer: tuple[ast.AST, ...], *, is_said: bool) -> Access:
    """``getattr``, ``setattr``, ``next``, ``vars`` and ``os.getenv`` are accesses of their own."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if isinstance(node.func, ast.Attribute) and node.func.attr in (*SETTERS, *_OF_ENVIRONMENT):
        name = node.func.attr
    if name in _OF_ENVIRONMENT and node.args:
        return Access(node, True, False, is_said=is_said)
    if (name == "vars" and node.args) or (name == "getattr" and len(node.args) > 1):
        use, given_to = use_of(node, outer)
        return Access(node, True, False, use=use, given_to=given_to, is_said=is_said)
    if name == "hasattr" and len(node.args) > 1:
        return Access(node, True, False, is_said=is_said)
    if name in SETTERS and len(node.args) > 1:
        return Access(node, False, True, assigned=node.args[-1])
    if isinstance(node.func, ast.Attribute) and node.func.attr in SETS_TORCHS:
        return Access(node, False, True)
    if name == "next" and node.args:
        return Access(node.args[0], True, False, use=Use.BOTH)
    return _any_call(node, outer, is_said)


def asks_any_name(node: ast.Call) -> bool:
    """Return whether a call is one of ``getattr`` whose name is no constant."""
    is_getattr = isinstance(node.func, ast.Name) and node.func.id == "getattr"
    return is_getattr and len(node.args) > 1 and not isinstance(node.args[1], ast.Constant)


def _any_call(node: ast.Call, outer: tuple[ast.AST, ...], is_said: bool) -> Access:
    use, given_to = use_of(node, outer)
    if use is not Use.NONE and name_called(node) in COPIES:
        use = Use.READ
    opened = opened_by(node, outer)
    found = node, True, False, None, use, given_to, is_said
    return Access(*found, is_call=True, opened_by=opened)
