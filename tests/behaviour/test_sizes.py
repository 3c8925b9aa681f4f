"""The sizes of files, folders, functions and conditions: past these, something is two things."""

import ast
import functools
import importlib
import inspect
import io
import pkgutil
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import blockpipe

pytestmark = pytest.mark.every

ROOT = Path(blockpipe.__file__).parents[1]
MOST_LINES = 450  # of a file
MOST_MODULES = 14  # of a folder, without its __init__
MOST_CODE_LINES = 49  # of a function, without comments and its docstring
MOST_PARAMETERS = 8  # of a function that no user calls
MOST_TERMS = 4  # of a condition
FILES = {
    folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("blockpipe", "examples", "tests")
}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.mark.parametrize("folder", FILES)
def test_files_are_short(folder):
    assert len(FILES[folder]) > 15
    lengths = {path: len(path.read_text().splitlines()) for path in FILES[folder]}
    too_long = {str(path): length for path, length in lengths.items() if length > MOST_LINES}
    assert not too_long, "a file of more than 450 lines has two topics: split it"


def test_folders_of_the_package_are_small():
    folders = {path.parent for path in FILES["blockpipe"]}
    counts = {str(folder): len(list(folder.glob("[!_]*.py"))) for folder in folders}
    assert max(counts.values()) <= MOST_MODULES, counts


@pytest.mark.parametrize("folder", FILES)
def test_functions_are_short(folder):
    seen, too_long = 0, []
    for path in FILES[folder]:
        for function in _functions(path):
            seen += 1
            if (function.end_lineno or 0) - function.lineno < MOST_CODE_LINES:
                continue
            first = function.body[ast.get_docstring(function) is not None :]
            head = {*range(function.lineno, function.body[0].lineno)}
            body = {*range(first[0].lineno, (first[-1].end_lineno or 0) + 1)} if first else set()
            if len(_code_lines(path) & (head | body)) > MOST_CODE_LINES:
                too_long.append(f"{path}:{function.lineno} {function.name}")
    assert seen > 50
    assert not too_long


def test_only_what_users_call_takes_many_parameters():
    """And then all but a few are keyword-only."""
    public = set(_public_functions())
    assert len(public) > 100
    for path in FILES["blockpipe"]:
        for function in _functions(path):
            given = function.args
            positional = [a.arg for a in (*given.posonlyargs, *given.args)]
            keywords = [a.arg for a in (*given.kwonlyargs, given.vararg, given.kwarg) if a]
            first = min([function, *function.decorator_list], key=lambda node: node.lineno)
            is_public = (path, first.lineno) in public
            counted = positional if is_public else positional + keywords
            count = len([name for name in counted if name not in ("self", "cls")])
            assert count <= MOST_PARAMETERS, f"{path}:{function.lineno} {function.name}: {count}"


@pytest.mark.parametrize("folder", FILES)
def test_conditions_are_short(folder):
    seen, too_long = 0, []
    for path in FILES[folder]:
        for node in _nodes(path):
            if isinstance(node, ast.BoolOp):
                seen += 1
                if _terms(node) > MOST_TERMS:
                    too_long.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert seen > 15
    assert not too_long, "give a part of it a name"


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _functions(path: Path) -> Iterator[Function]:
    yield from (node for node in _nodes(path) if isinstance(node, Function))


@functools.cache
def _code_lines(path: Path) -> set[int]:
    """The numbers of the lines with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _terms(condition: ast.expr) -> int:
    if isinstance(condition, ast.BoolOp):
        return sum(map(_terms, condition.values))
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return _terms(condition.operand)
    return 1


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:  # a library that is not installed
        assert not (missing.name or "").startswith("blockpipe"), missing
        return None


def _public_functions() -> Iterator[tuple[Path, int]]:
    """Where each function is defined that an ``__all__`` names, or that is a public method or the
    constructor of a class there."""
    names = [info.name for info in pkgutil.walk_packages(blockpipe.__path__, "blockpipe.")]
    names = ["blockpipe", *(name for name in names if not name.endswith("__main__"))]
    for package in filter(None, map(_imported, names)):
        for name in getattr(package, "__all__", ()):
            found = getattr(package, name)
            functions = [found]
            if inspect.isclass(found):
                members = inspect.getmembers(found)
                functions = [m for name, m in members if name == "__init__" or name[0] != "_"]
            for function in functions:
                code = getattr(inspect.unwrap(function), "__code__", None)
                if code is not None:
                    yield Path(code.co_filename), code.co_firstlineno
