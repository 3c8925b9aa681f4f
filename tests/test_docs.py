"""The documentation runs: every Python block of the pages, every example of a docstring."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import blockpipe

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize("page", [page for page in PAGES if _examples(page)])
def test_page_runs(page: str) -> None:
    """Every Python block of a page runs, in order, in one namespace."""
    for example in _examples(page):
        example.evaluate()


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
