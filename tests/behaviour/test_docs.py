"""The documentation runs: every Python block of the pages, every example of a docstring."""

import ast
import contextlib
import doctest
import enum
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import blockpipe

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if "_build" not in page.parts
)
MODULES = ["blockpipe"] + [
    module.name
    for module in pkgutil.walk_packages(blockpipe.__path__, "blockpipe.")
    if not module.name.endswith(("__main__", "poptorch.optim"))  # the latter's import fails
]
# What users may import: the names in these modules' ``__all__``.
PUBLIC = ("blockpipe", "blockpipe.errors", "blockpipe.reports", "blockpipe.schedules")
PUBLIC += ("blockpipe.distributed", "blockpipe.replicas", "blockpipe.testing")
# Other libraries' names, under their paths.
PUBLIC += ("blockpipe.compat.keras", "blockpipe.compat.poptorch")
PUBLIC += ("blockpipe.compat.torchdistpackage", "blockpipe.compat.torchdistpackage.dist")
PUBLIC += tuple(f"blockpipe.compat.torchgpipe{one}" for one in ("", ".skip", ".balance"))
PUBLIC += ("blockpipe.compat.torchgpipe.balancing", "blockpipe.compat.fairscale")
PUBLIC += tuple(f"blockpipe.compat.fairscale.nn{one}" for one in ("", ".pipe", ".pipe.skip"))
PUBLIC += ("blockpipe.compat.fairscale.nn.pipe.balance",)
PUBLIC += tuple(
    f"blockpipe.integrations.{one}" for one in ("accelerate", "lightning", "transformers")
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _examples(page: str) -> list:
    sybil = Sybil([PythonCodeBlockParser(doctest_optionflags=OPTIONS)], path=str(ROOT))
    return list(sybil.parse(ROOT / page).examples())


WITH_OUTPUTS = [page for page in PAGES if "```output" in (ROOT / page).read_text()]


@pytest.mark.every
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in WITH_OUTPUTS and _examples(page)]
)
def test_every_python_block_of_a_page_runs(page: str) -> None:
    """Every Python block of a page without output blocks runs, in order, in one namespace."""
    for example in _examples(page):
        example.evaluate()


def _squeezed(text: str) -> str:
    """What has to be equal: not the lines of library files, nor the widths that follow from them."""
    text = re.sub(r"(?<!train)\.py:\d+", ".py:0", text)
    return re.sub(r"─+", "─", re.sub(r"[^\S\n]+", " ", text)).strip()


@pytest.mark.every
@pytest.mark.parametrize("page", WITH_OUTPUTS)
def test_output_blocks_are_what_is_printed(page: str, pytestconfig: pytest.Config) -> None:
    """Every Python block of the other pages runs, and an ``output`` block is what the one before it
    prints; ``--update-golden`` writes it.

    Doctest was no alternative: it wants a marker for each empty line, and tables have many.
    """
    names: dict[str, object] = {}
    lines = 0
    printed = ""

    def run(block: re.Match[str]) -> str:
        nonlocal lines, printed
        kind, text = block.groups()
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):  # lines as if all blocks were one file
                exec(compile("\n" * lines + text, "train.py", "exec"), names)
            lines += text.count("\n")
            printed = out.getvalue()
        elif not pytestconfig.getoption("--update-golden"):
            assert _squeezed(printed) == _squeezed(text)
        else:
            return f"```output\n{printed}```"
        return block[0]

    old = (ROOT / page).read_text()
    new = re.sub(r"```(python|output)\n(.*?)```", run, old, flags=re.DOTALL)
    if new != old:
        (ROOT / page).write_text(new)


@pytest.mark.every
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    """Every example in a module's docstrings gives what it says."""
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    report: list[str] = []
    for test in finder.find(module, name):
        if test.examples:  # to run none looks at every source file
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_class_and_function_has_an_example(module: str) -> None:
    """Only exceptions, which the page on errors shows, and enumerations may have none."""
    public = importlib.import_module(module)
    values = {name: getattr(public, name) for name in public.__all__}
    missing = [
        name
        for name, value in values.items()
        if isinstance(value, type) or inspect.isroutine(value)
        if not (isinstance(value, type) and issubclass(value, (Exception, enum.Enum)))
        if ">>>" not in value.__doc__
    ]
    assert missing == []


def _is_public(path: str) -> bool:
    """Whether a dotted path is a public module, or a name in the ``__all__`` of one."""
    module, _, name = path.rpartition(".")
    return path in PUBLIC or (module in PUBLIC and name in importlib.import_module(module).__all__)


def _imported(page: str) -> Iterator[str]:
    """The dotted paths of Blockpipe that a page's code imports."""
    code = re.sub(r"^(>>> |\.\.\. )", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    statement = r"^ *((?:import|from) +blockpipe\b[^\n(]*(?:\([^)]*\))?)"
    for text in re.findall(statement, code, re.MULTILINE):
        (node,) = ast.parse(text).body
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _documented(page: str) -> Iterator[str]:
    """The dotted paths that a reference page's autodoc directives name."""
    current = ""
    directive = r"^\.\. (currentmodule|auto\w+):: (\S+)\n((?:   .*\n)*)"
    for kind, target, options in re.findall(directive, (ROOT / page).read_text(), re.MULTILINE):
        if kind == "currentmodule":
            current = target
        path = target if target.startswith("blockpipe") else f"{current}.{target}"
        yield path
        members = re.search(r":members: *(.+)", options)
        if kind == "automodule" and members:
            yield from (f"{path}.{name.strip()}" for name in members[1].split(","))


@pytest.mark.parametrize(("found", "least"), [(_imported, 20), (_documented, 70)])
def test_pages_name_what_is_public(found: Callable[[str], Iterator[str]], least: int) -> None:
    """They tell nobody to import, and document, nothing of a module that is not."""
    paths = [(page, path) for page in PAGES for path in found(page)]
    assert len(paths) >= least
    assert [one for one in paths if not _is_public(one[1])] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist_and_are_no_modules(module: str) -> None:
    """A function with the name of a module beside it would hide that module."""
    public = importlib.import_module(module)
    for name in public.__all__:
        assert getattr(public, name).__doc__, name
        is_package = hasattr(public, "__path__")
        assert not (is_package and importlib.util.find_spec(f"{module}.{name}")), name
