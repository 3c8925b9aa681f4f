"""What the docstrings of public names say."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .test_docs import PUBLIC


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_names_its_parameters(module: str) -> None:
    """In its ``Args`` or its text. What another library's class asks a method to take is described
    there."""
    missing = {
        name: unnamed
        for name, function, text in _functions(module)
        if (unnamed := [one for one in _parameters(function) if not re.search(rf"\b{one}\b", text)])
    }
    assert missing == {}


def _functions(module: str) -> Iterator[tuple[str, Any, str]]:
    """The public functions of a module, and the methods of its public classes, with what describes
    them."""
    public = importlib.import_module(module)
    for name in public.__all__:
        value = getattr(public, name)
        if inspect.isclass(value):
            yield from _methods(name, value)
        elif inspect.isfunction(value) and _is_ours(value):
            yield name, value, value.__doc__ or ""


def _methods(name: str, kind: type) -> Iterator[tuple[str, Any, str]]:
    ours = [base for base in kind.__mro__ if _is_ours(base)]
    others = [base for base in kind.__mro__ if not _is_ours(base) and base is not object]
    for method, function in inspect.getmembers(kind, inspect.isroutine):
        is_theirs = any(hasattr(base, method) for base in others)
        if not _is_ours(function) or not hasattr(function, "__code__"):
            continue
        if method == "__init__" and "<string>" not in function.__code__.co_filename:
            yield name, function, "".join(base.__doc__ or "" for base in ours)
        elif not method.startswith("_") and not is_theirs:
            yield f"{name}.{method}", function, function.__doc__ or ""


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "blockpipe"


def _parameters(function: Any) -> list[str]:
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
