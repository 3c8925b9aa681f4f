"""The modules, and the members of modules, that import statements inside functions bind.

Such a name is a local variable, and yet what it refers to outlives the call, as a global does.
"""

import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from typing import Any, NamedTuple


class _Import(NamedTuple):
    """An import statement, or the part of one that is about one module."""

    name: str
    level: int  # the number of dots before the name
    members: tuple[str, ...]  # what is imported from it


def imported_in(function: types.FunctionType) -> list[Any]:
    """Return what a function's import statements bind, as far as it has been imported by now."""
    found = list[Any]()
    for name, level, members in _imports_of(function.__code__):
        module = module_named("." * level + name, function.__globals__)
        if module is not None:
            full = module.__name__
            outer = sys.modules.get(full.partition(".")[0])
            inner = [sys.modules.get(f"{full}.{member}") for member in members]
            held = [vars(module)[member] for member in members if member in vars(module)]
            found += [one for one in (module, outer, *inner, *held) if one is not None]
    return found


def module_named(name: str, names: Mapping[str, Any]) -> types.ModuleType | None:
    """Return the module that an import statement means, if it is loaded.

    Args:
        name: its name, with the dots before it.
        names: the globals of the code that the statement is in.
    """
    try:
        return sys.modules.get(resolve_name(name, names.get("__package__") or ""))
    except ImportError:  # it is in no package
        return None


@functools.lru_cache(10_000)
def _imports_of(code: types.CodeType) -> tuple[_Import, ...]:
    return tuple(_imports_in(code))


def _imports_in(code: types.CodeType) -> Iterator[_Import]:
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:  # else there is none
        loaded: list[Any] = []
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                level, members = loaded[-2:]
                yield _Import(instruction.argval, level, members or ())
            elif instruction.opname.startswith("LOAD_"):
                loaded.append(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imports_in(inner)
