"""Whether a function's code may change what outlives its call, by its names and instructions."""

import dis
import functools
import types

from .effects import ASKS_CHANCE, CHANGES

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__setstate__", "__repr__", "extra_repr")
_STORES = frozenset(
    [
        *("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_SLICE"),
        *("DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR"),
    ]
)
_ARGUMENTS = frozenset(["out", "generator"])
_RUNS_ANY = frozenset(
    [
        *("exec", "eval", "getattr", "import_module", "__import__", "__call__", "methodcaller"),
        *("data", "partial", "globals", "vars", "__dict__"),
    ]
)


@functools.lru_cache(10_000)
def may_set(code: types.CodeType) -> bool:
    """Return whether a function's code may set a value that outlives its call."""
    if code.co_name in _CONSTRUCTORS:
        return False
    if not CHANGES.isdisjoint(code.co_names):
        return True
    operations = {instruction.opname for instruction in dis.get_instructions(code)}
    sets_variable = "STORE_DEREF" in operations and code.co_freevars
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return bool(sets_variable) or not _STORES.isdisjoint(operations) or any(map(may_set, inner))


@functools.lru_cache(10_000)
def may_leave(code: types.CodeType) -> bool:
    """Return whether a function's code may change anything that outlives its call, a tensor or a
    random generator too, or run code that nobody knows."""
    if code.co_name in _CONSTRUCTORS:
        return False
    constants = code.co_consts
    inner = (one for one in constants if isinstance(one, types.CodeType))
    given = {name for names in constants if isinstance(names, tuple) for name in names}
    texts = (*code.co_names, *(one for one in constants if isinstance(one, str)))
    is_told = bool(_ARGUMENTS & given) or any(map(_tells_of_change, texts))
    return is_told or may_set(code) or any(map(may_leave, inner))


def _tells_of_change(name: str) -> bool:
    """Return whether a name may be that of something that changes others, or runs any code."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _RUNS_ANY or name in ASKS_CHANCE
