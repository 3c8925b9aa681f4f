"""The documentation runs: every Python block of the pages, every example of a docstring."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
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
    if not module.name.endswith("__main__")
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _examples(page: str) -> list:
    sybil = Sybil([PythonCodeBlockParser(doctest_optionflags=OPTIONS)], path=str(ROOT))
    return list(sybil.parse(ROOT / page).examples())


@pytest.mark.every
@pytest.mark.parametrize("page", [page for page in PAGES if _examples(page)])
def test_every_python_block_of_a_page_runs(page: str) -> None:
    """Every Python block of a page runs, in order, in one namespace."""
    for example in _examples(page):
        example.evaluate()


def _squeezed(text: str) -> str:
    """What has to be equal: not the lines of library files, nor the widths that follow from them."""
    text = re.sub(r"(?<!train)\.py:\d+", ".py:0", text)
    return re.sub(r"─+", "─", re.sub(r"[^\S\n]+", " ", text)).strip()


@pytest.mark.every
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```output" in (ROOT / page).read_text()]
)
def test_output_blocks_are_what_is_printed(page: str, pytestconfig: pytest.Config) -> None:
    """An ``output`` block is what the Python block before it prints; ``--update-golden`` writes it.

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
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
