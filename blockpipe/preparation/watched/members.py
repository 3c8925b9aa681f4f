"""Which members of the user's objects are watched between steps."""

import dis
import functools
import types
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from ..._common.libraries import has_users_code, is_users
from ..._common.modules import STATE
from ..._torch.modules import COMPILED_CALL
from ...restoring.holders import (
    CacheHolder,
    ContentHolder,
    DictHolder,
    FunctionHolder,
    Holder,
    NamesHolder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
)
from .reading import frozen, has_names, size_of
from .seen import MOST_IN_ORDER, Code, seen

TORCHS = frozenset(vars(nn.Module()))
"""The attributes of every module."""
_MOST_MEMBERS = 256  # of a dictionary; a larger one is probably a vocabulary
_CODE = ("forward", STATE, COMPILED_CALL)  # a module's: Fingerprint compares it, or ours


def is_read(holder: Holder) -> bool:
    """Return whether a forward may read the user's plain values there. Objects of libraries hold
    none."""
    owner = holder.owner
    if isinstance(holder, ContentHolder | CacheHolder):
        return False
    if isinstance(holder, SlotsHolder):
        return is_users(type(owner).__module__)
    return not isinstance(owner, types.FunctionType) or has_users_code(owner)


def is_known(module: nn.Module, key: Hashable, value: Any) -> bool:
    """Return whether a module's attribute is torch's, or ours. On torch's own layers, users set
    only numbers."""
    is_layers = type(module).__module__.startswith("torch.nn.")
    is_torchs = key in TORCHS or (is_layers and type(value) not in (int, float, Code))
    return str(key).startswith("_blockpipe_") or key in _CODE or is_torchs


def may_fill(holder: Holder) -> bool:
    """Return whether an object without plain values may get some: a module, a container, an object.
    There are thousands of functions and parameters, which hardly do."""
    is_kept = has_names(holder) and not isinstance(holder.owner, types.FunctionType | Tensor)
    return is_kept or isinstance(holder, SequenceHolder)


def seen_members(holder: Holder) -> dict[Hashable, Any]:
    """Return what is seen of an object's members; none of a container with too many."""
    if isinstance(holder, SetHolder):
        found = frozen(holder)
        return {} if found is None else {None: found}
    if isinstance(holder, DictHolder | SequenceHolder):
        most = _MOST_MEMBERS if isinstance(holder, DictHolder) else MOST_IN_ORDER
        if size_of(holder) > most:
            return {}
    members = dict(holder.now())
    names = set(members)
    if isinstance(holder, FunctionHolder):
        names -= {"__defaults__", "__kwdefaults__"}
    if isinstance(holder, NamesHolder) and holder.namespace() is holder.owner.__globals__:
        names &= globals_in(holder.owner.__code__)
    return {key: seen(value) for key, value in members.items() if key in names}


@functools.lru_cache(1_000)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function reads; its other names are attributes."""
    found: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            found |= globals_in(instruction.argval)
    return frozenset(found)


def is_torchs_variable(variable: Hashable) -> bool:
    """Return whether torch itself sets an environment variable, when a part of it is first used."""
    return isinstance(variable, bytes) and variable.startswith((b"TORCH", b"PYTORCH"))
