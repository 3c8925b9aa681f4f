"""The shape of the package: imports without circles, and what is public."""

import ast
import collections
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blockpipe

pytestmark = pytest.mark.every

PACKAGE = Path(blockpipe.__file__).parent


# From the bottom to the top: what a folder may import is above it in this list. Those in one line do
# not know each other.
LAYERS = [
    "errors",
    "_torch",
    "_common",
    "schedules",
    "stages",
    "devices",
    "batches",
    "restoring",
    "crossing",
    "costs",
    "recording",
    "weights",
    "preparation",
    "execution",
    "partitioning reports",
    "distributed",
    "pipeline",
    "replicas",
    "compat integrations testing",
    "cli",
]
# The methods of a recording that open a view of it import the view when they are called.
VIEWS = {
    ("recording.recording", "reports.summary.summary"),
    ("recording.recording", "reports.summary.explain"),
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """What each module imports of the package; imports for types alone count, and those in
    functions."""
    return {name: set(_imported(name, path)) for name, path in MODULES.items()}


def _imported(name: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            assert not isinstance(node, ast.Import) or "blockpipe" not in ast.unparse(node)
            continue
        if node.level == 0:
            assert (node.module or "").partition(".")[0] != "blockpipe", (
                f"{path}: import relatively"
            )
            continue
        package = name.split(".")[: -node.level]
        module = ".".join([*package, *(node.module or "").split(".")]).strip(".")
        if module in MODULES:
            yield module
        else:  # a module of a folder, or the version of the package itself
            found = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            yield from (one for one in found if one in MODULES)
            rest = [
                alias.name
                for alias, one in zip(node.names, found, strict=True)
                if one not in MODULES
            ]
            assert not rest or (module, rest) == ("", ["__version__"]), f"{path}: {module} {rest}"


def test_the_whole_package_is_looked_at():
    assert len(MODULES) > 110
    assert sum(map(len, _imports().values())) > 600
    assert {name.partition(".")[0] for name in MODULES} == {
        n for line in LAYERS for n in line.split()
    }


def test_imports_go_one_way_from_folder_to_folder():
    level = {name: height for height, line in enumerate(LAYERS) for name in line.split()}
    for module, needs in _imports().items():
        own = module.partition(".")[0]
        for needed in needs:
            other = needed.partition(".")[0]
            if own != other and (module, needed) not in VIEWS:
                assert level[other] < level[own], f"{module} imports {needed}"


def test_modules_import_in_no_circle():
    graph = {name: set(needs) for name, needs in _imports().items()}
    for data, view in VIEWS:
        graph[data] -= {view}
    while graph:
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert free, f"a circle among {sorted(graph)}"
        for name in free:
            del graph[name]


def test_each_folder_says_what_it_is():
    """And what comes in, what goes out, and what to read first."""
    for folder in {path.parent for path in MODULES.values()} - {PACKAGE}:
        about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert 3 <= len(about.splitlines()) <= 8, folder


def test_data_does_not_need_torch():
    """Schedules and plans, and what they import."""
    graph = _imports()
    free = {name for name in MODULES if name.startswith("schedules.")}
    free |= {"stages.plan", "stages.plan_text"}
    while more := set().union(*(graph[name] for name in free)) - free:
        free |= more
    for name in free:
        tree = ast.parse(MODULES[name].read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any((module or "").partition(".")[0] == "torch" for module in imported), name


# Of Python's own, with an underscore for other reasons than to be private.
PYTHONS = {
    *("_asdict", "_fields", "_make", "_replace"),
    *(
        "_current_frames",
        "_data",
        "_exit",
        "_getframe",
        "_lru_cache_wrapper",
    ),  # _data: of os.environ
    *("_SimpleCData", "_type_"),  # of ctypes, documented
    *("_abc_caches_clear", "_abc_registry_clear", "_get_dump"),  # of abc, for tests
}


def test_private_names_of_torch_are_behind_one_wall():
    """Nothing but ``_torch`` imports a private name from torch, or asks anything for a private
    attribute that no class of the package has. Names that the wall uses are no text elsewhere
    either (``getattr(module, "_buffers")``), but for slots."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    walls = {tree for path, tree in trees.items() if path.parent.name == "_torch"}
    wall = {name for tree in walls for name in _private_names(tree)}
    ours = {name for tree in trees.values() for name in _defined(tree)} - wall
    assert len(wall) > 40
    for path, tree in trees.items():
        if tree in walls:
            continue
        own = set(_defined(tree))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                # An operator's name says whose it is: torch.ops.aten._unique2.
                if ast.unparse(node.value) not in ("self", "cls", "super()", "_aten"):
                    names = [node.attr] if node.attr not in ours | PYTHONS else []
            elif isinstance(node, ast.Constant) and node.value in wall - own:
                names = [node.value]
            found = [name for name in names if _is_private(name)]
            assert not found, f"{path}:{node.lineno} names {found}; see _torch/__init__.py"


def _private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and _is_private(str(node.value)):
            yield str(node.value)
        elif isinstance(node, ast.alias) and _is_private(node.name):
            yield node.name


def _defined(tree: ast.AST) -> Iterator[str]:
    """What classes have: methods, attributes of the class and of ``self``, slots."""
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            yield node.attr
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef):
                yield member.name
            elif isinstance(member, ast.AnnAssign):
                yield ast.unparse(member.target)
            elif isinstance(member, ast.Assign):
                yield from map(ast.unparse, member.targets)
                if ast.unparse(member.targets[0]) == "__slots__":
                    names = (n for n in ast.walk(member.value) if isinstance(n, ast.Constant))
                    yield from (name.value for name in names)


def _is_private(name: str) -> bool:
    return name.isidentifier() and re.match("_[^_]", name) is not None


def test_the_engine_knows_no_observer():
    """Only its interface: what collects and draws is imported by pipelines' methods alone."""
    importers = {
        name for name, needs in _imports().items() if "reports.timeline.profiling" in needs
    }
    assert importers == {"reports.report_methods"}


def test_each_test_file_is_named_for_the_module_that_it_tests():
    """In a folder of the module's; topics are in behaviour/."""
    tests = PACKAGE.parent / "tests"
    found = [path.relative_to(tests) for path in tests.rglob("test_*.py")]
    assert len(found) > 60
    for path in found:
        if path.parts[0] not in ("behaviour", "simulated"):
            module = PACKAGE / path.with_name(path.name.removeprefix("test_"))
            assert module.exists(), f"tests/{path}: there is no {module}"


def test_no_two_classes_have_one_name():
    """But for the folder of other libraries' names, where a class has the name that they gave it."""
    homes = collections.defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not name.startswith("compat."):
                homes[node.name].append(name)
    assert len(homes) > 300
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_nothing_runs_what_it_reads():
    """SECURITY.md says so: no pickle, no evaluated text, no other program, no network."""
    modules, names = set(), set()
    for path in PACKAGE.rglob("*.py"):
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
    rows = re.findall(r"`([A-Z_]+)`, ([\d,]+) \| .* `blockpipe/([\w/]+)\.py`", page)
    assert len(rows) >= 7
    for name, number, module in rows:
        found = getattr(importlib.import_module(f"blockpipe.{module.replace('/', '.')}"), name)
        assert found == int(number.replace(",", "")), name


def test_every_public_name_has_a_docstring():
    """And is importable from the top."""
    for name in blockpipe.__all__:
        assert getattr(blockpipe, name).__doc__, name


def test_importing_changes_nothing():
    """No hook, mode or thread is left by the import, and no library comes with it that only some
    users have."""
    program = """
import sys, threading, torch
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
apply, reduce, call = torch.autograd.Function.apply, torch.Tensor.__reduce_ex__, torch.nn.Module.__call__
import blockpipe
assert torch.autograd.Function.apply == apply
assert torch.Tensor.__reduce_ex__ is reduce
assert torch.nn.Module.__call__ is call
assert not any(vars(module)[name] for name in vars(module) if name.startswith("_global_") and name.endswith("_hooks"))
assert not _get_current_function_mode_stack()
assert threading.active_count() == 1
import sys
assert not {"accelerate", "lightning", "peft", "torchmetrics", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_the_repository_imports_of_the_package_is_there():
    """Examples, benchmarks, tests, and the scripts of the pages."""
    seen = 0
    for folder in ("docs", "examples", "tests"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and _is_ours(node.module) and not node.level:
                    try:
                        module = importlib.import_module(node.module or "")
                    except ModuleNotFoundError as missing:  # a library that is not installed
                        assert not _is_ours(missing.name), missing
                        continue
                    for alias in node.names:
                        if not hasattr(module, alias.name):
                            importlib.import_module(f"{node.module}.{alias.name}")
                    seen += 1
    assert seen > 100


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "blockpipe"
