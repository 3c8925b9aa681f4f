"""Which code is the user's own, and which of it libraries have been given.

A registry of attention functions, a function of a library's module that the user's has replaced, a
method of its class: a library's code calls the user's, and no attribute of the model leads to it.
"""

import functools
import sys
import types
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

FOREIGN = (
    *(f"{name}." for name in ("torch", "threading", "logging", "multiprocessing", "concurrent")),
    *(f"{name}." for name in ("asyncio", "_io", "numpy", __name__.partition(".")[0])),
)
"""Objects of these packages are not a forward's state: locks, handlers, our own marks."""

_OF_NO_PACKAGE = frozenset(["torch", "builtins", "__main__", *sys.stdlib_module_names])


@functools.cache
def is_users(module: str | None) -> bool:
    """Whether a module is the user's own, and not the standard library's or an installed
    package's."""
    if not isinstance(module, str | None):
        return False  # a class of Cython has a descriptor there
    package = (module or "").partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return not is_installed and not f"{module}.".startswith(FOREIGN)


def has_users_code(function: types.FunctionType) -> bool:
    """Whether a function's code is the user's own. A decorator's function names the module of the
    one that it is around: a library's (``@torch.compile``) around the user's, or the reverse."""
    return is_users(function.__globals__.get("__name__"))


def given_to_libraries(classes: Iterable[type]) -> Iterator[types.FunctionType]:
    """Yield the user's functions that packages call by a name in one of their modules, by a method
    of a class, or out of a dictionary that an object there, or its class, has.

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


def _users_in(value: Any, module: str, packages: Container[str]) -> Iterator[types.FunctionType]:
    kind = type(value)
    if kind is types.FunctionType:
        yield from _users_among([value])
    elif isinstance(value, type):
        if value.__module__ == module:
            yield from _users_among(vars(value).values())
    elif kind.__module__.partition(".")[0] in packages:
        for names in (getattr(value, "__dict__", {}), vars(kind)):
            for member in names.values():
                if isinstance(member, dict):
                    yield from _users_among(dict.values(member))


def _users_among(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    for value in values:
        if type(value) is types.FunctionType and has_users_code(value):
            yield value
