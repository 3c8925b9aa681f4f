"""The shape of the package: imports without circles, and what is public."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import blockpipe

PACKAGE = Path(blockpipe.__file__).parent


@functools.cache
def _imports() -> dict[str, set[str]]:
    graph = {}
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        graph[path.stem] = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        }
    return graph


def test_no_import_circle():
    """Imports go one way; those under TYPE_CHECKING, inside of an ``if``, are for types alone."""
    graph = {name: set(needs) for name, needs in _imports().items()}
    for data, views in {
        "recording": ("rows", "summary", "explain"),
        "summary": ("summary_text", "summary_html"),
    }.items():
        for view in views:
            graph[view] -= {data}
    graph.pop("__init__")
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"a circle among {sorted(graph)}"
        for name in free:
            del graph[name]


def test_data_does_not_need_torch():
    """Schedules and plans import what needs none either, and nothing imports the pipeline but the doors."""
    graph = _imports()
    assert graph["schedule"] == graph["layout"] == {"errors"}
    assert graph["plan"] == {"bounded", "errors", "layout", "replacing", "table"}
    assert graph["bounded"] == graph["replacing"] == graph["table"] == set()
    assert graph["simulate"] == {"errors", "schedule"}
    assert graph["scheduler"] == {"errors", "schedule", "simulate"}
    assert {name for name, needs in graph.items() if "pipeline" in needs} == {
        "__init__",
        "assignment",
        "commands",
    }


def test_the_engine_knows_no_observer():
    """Only its interface: what collects and draws is imported by the front door alone."""
    graph = _imports()
    importers = {name for name, needs in graph.items() if "profiling" in needs}
    assert importers == {"pipeline"}
    assert {name for name, needs in graph.items() if "timeline" in needs} == {
        "__init__",
        "commands",
        "pipeline",
        "profiling",
    }


def test_nothing_runs_what_it_reads():
    """SECURITY.md says so: no pickle, no evaluated text, no other program, no network."""
    modules, names = set(), set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                modules.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names.add(node.func.id)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node)
    assert not modules & {"http", "pickle", "marshal", "requests", "shelve", "socket", "subprocess"}
    assert not names & {"eval", "exec", "compile", "__import__"}


def test_the_bounds_are_those_of_the_security_page():
    """By name, number and file."""
    page = (PACKAGE.parent / "SECURITY.md").read_text()
    rows = re.findall(r"`([A-Z_]+)`, ([\d,]+) \| .* `blockpipe/(\w+)\.py`", page)
    assert len(rows) >= 7
    for name, number, module in rows:
        found = getattr(importlib.import_module(f"blockpipe.{module}"), name)
        assert found == int(number.replace(",", "")), name


def test_every_public_name_has_a_docstring():
    """And is importable from the top."""
    for name in blockpipe.__all__:
        assert getattr(blockpipe, name).__doc__, name


def test_importing_changes_nothing():
    """No hook, mode or thread is left by the import."""
    program = (
        "import torch, threading; before = torch.autograd.Function.apply;"
        "import blockpipe; assert torch.autograd.Function.apply == before;"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
