"""Which code is the user's own, and which of it libraries have been given.

A registry of attention functions, a function of a library's module that the user's has replaced, a
method of its class: a library's code calls the user's, and no attribute of the model leads to it.
"""

import functools
import re
import sys
import types
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

FOREIGN = (
    *(f"{name}." for name in ("torch", "threading", "logging", "multiprocessing", "concurrent")),
    *(f"{name}." for name in ("asyncio", "_io", "numpy", __name__.partition(".")[0])),
    "namedtuple_",  # what the standard library writes for a class, whosever it is
)
"""Objects of these packages are not a forward's state: locks, handlers, our own marks."""

_OF_NO_PACKAGE = frozenset(["torch", "builtins", "__main__", *sys.stdlib_module_names])
# They hold nothing of the user's themselves.
_PLAIN = frozenset(
    [
        *(str, bytes, int, float, bool, complex, type(None), types.ModuleType, dict, list, tuple),
        *(set, frozenset, types.BuiltinFunctionType, types.MethodDescriptorType, re.Pattern),
    ]
)


@functools.cache
def is_users(module: str | None) -> bool:
    """Whether a module is the user's own, and not the standard library's, an installed package's or
    that of a backend, which torch calls for its device."""
    if not isinstance(module, str | None):
        return False  # a class of Cython has a descriptor there
    package = (module or "").partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    is_foreign = f"{module}.".startswith(FOREIGN) or module in _of_backends()
    return not is_installed and not is_foreign


def _of_backends() -> set[str]:
    """Return the modules that the functions of the accelerator's module are from."""
    functions = vars(torch.get_device_module()).values()
    return {f.__globals__["__name__"] for f in functions if type(f) is types.FunctionType}


def has_users_code(function: types.FunctionType) -> bool:
    """Whether a function's code is the user's own. A decorator's function names the module of the
    one that it is around: a library's (``@torch.compile``) around the user's, or the reverse."""
    return not is_mock(function) and is_users(function.__globals__.get("__name__"))


def is_mock(value: Any) -> bool:
    """Return whether an object is one of :mod:`unittest.mock`'s: to ask its class for a name, such
    as ``__next__``, makes another one."""
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(type(value), mock.NonCallableMock)


def poses(value: Any) -> bool:
    """Return whether an object says that it is of another class than it is, as mocks do that have a
    ``spec``: of what ``isinstance`` says of them, nothing is there."""
    return is_mock(value) and value.__class__ is not type(value)


def given_to_libraries(classes: Iterable[type]) -> Iterator[Any]:
    """Yield the user's functions, classes and objects that packages have by a name in one of their
    modules, in a class, in a list or a dictionary there, or in one that an object has.

    Args:
        classes: a model's, with those that they inherit from. All loaded modules of their packages
            are looked at; of torch, those that they are in.
    """
    names = {kind.__module__ for kind in classes if not is_users(kind.__module__)}
    packages = {name.partition(".")[0] for name in names} - _OF_NO_PACKAGE
    for name, module in [*sys.modules.items()]:
        if name in names or name.partition(".")[0] in packages:
            for value in [*getattr(module, "__dict__", {}).values()]:
                yield from _users_in(value, name, packages)


def given_by_name(module: types.ModuleType, names: Iterable[str]) -> Iterator[Any]:
    """Yield the user's functions, classes and objects that a library's module has by some names."""
    if not is_users(module.__name__):
        found = vars(module)
        yield from filter(_is_users_own, (found[name] for name in names if name in found))


def _users_in(value: Any, module: str, packages: Container[str]) -> Iterator[Any]:
    kind = type(value)
    if kind in (dict, list):
        yield from _users_among(value)
    elif kind in _PLAIN:
        return
    elif _is_users_own(value):
        yield value
    elif isinstance(value, type):
        if value.__module__ == module:
            yield from _users_among(vars(value))
    elif str(kind.__module__).partition(".")[0] in packages:
        attributes = [*getattr(value, "__dict__", {}).values(), *vars(kind).values()]
        for member in (value, *attributes):
            if isinstance(member, dict | list):
                yield from _users_among(member)


def _users_among(container: Any) -> Iterator[Any]:
    """Yield the user's own among the members of a list, or the values of a mapping."""
    values = container
    if not isinstance(container, list):
        values = (dict if isinstance(container, dict) else type(container)).values(container)
    values = [*values]  # another thread may set some
    return filter(_is_users_own, [value for value in values if type(value) not in _PLAIN])


def _is_users_own(value: Any) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        return has_users_code(value)
    if kind is types.MethodType:
        return _is_users_own(value.__func__) or _is_users_own(value.__self__)
    if kind is functools.partial:
        return _is_users_own(value.func)
    if kind in _PLAIN:
        return False
    module = value.__module__ if isinstance(value, type) else kind.__module__
    return module in sys.modules and is_users(module)
