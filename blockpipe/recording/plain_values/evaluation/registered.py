"""Which parameters, buffers and modules a module has: the code that registers one, or asks for all.

Their values are other places. Only how many there are, and of which names, is in these.
"""

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...._torch.modules import SLOTS, within
from ..syntax.accesses import Access
from ..syntax.uses import Use
from .expressions import Frame
from .members import Registered, member_of, own_attributes

_PARAMETERS, _BUFFERS, _MODULES = KEYS = tuple(map(Registered, SLOTS))
_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, *_OF_PARAMETERS)
_ADD_OR_REMOVE = frozenset(
    [
        *("append", "extend", "insert", "update", "setdefault"),
        *("pop", "popitem", "clear", "__setitem__", "__delitem__"),
    ]
)
_ASKED_BY = {
    **dict.fromkeys(("parameters", "named_parameters"), (_PARAMETERS, _MODULES)),
    **dict.fromkeys(("buffers", "named_buffers"), (_BUFFERS, _MODULES)),
    **dict.fromkeys(("modules", "named_modules", "apply"), (_MODULES,)),
    "state_dict": KEYS,
}
_BY_PATH = ("get_buffer", "get_parameter", "get_submodule")
_OF_CHILDREN = ("children", "named_children")


def places_of(owner: Any, runs: bool = True) -> list[tuple[Any, Registered, Any]]:
    """Return the places of which members a module has, with the names there; none for others.

    Args:
        owner: an object of which code sets something.
        runs: whether the code runs; else nobody can tell whether it adds or removes any.
    """
    if not isinstance(owner, nn.Module) or not runs:
        return []
    return [(owner, key, member_of(owner, key)) for key in KEYS]


def added_to(node: ast.expr, frame: Frame) -> Any:
    """Return the container of modules or parameters to which a call's method adds members, or from
    which it removes some; ``None``: it is no such call."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_named = node.func.attr in _ADD_OR_REMOVE
        owner = frame.evaluated(node.func.value) if is_named else None
        return owner if isinstance(owner, _CONTAINERS) else None
    return None


def walked_by(node: ast.Call, frame: Frame) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the places that a call reads that walks over members, as ``parameters()`` does, that
    finds one by its path, or that calls modules one after the other."""
    if isinstance(called := frame.evaluated(node.func), nn.Sequential):
        yield called, _MODULES
    if not isinstance(node.func, ast.Attribute):
        return
    name, owner = node.func.attr, None
    if name in _ASKED_BY or name in _OF_CHILDREN:
        owner = frame.evaluated(node.func.value)
    if isinstance(owner, nn.Module):
        if name in _OF_CHILDREN:
            yield from _members_in(owner, _MODULES)
        for module in () if name in _OF_CHILDREN else within(owner):
            for key in _ASKED_BY[name]:
                yield from _members_in(module, key)
    elif name in _BY_PATH:
        yield from along_path(node, frame)


def along_path(node: ast.Call, frame: Frame) -> Iterator[tuple[nn.Module, str]]:
    """Yield the places along the path that a method of a module's is given first."""
    given = [frame.evaluated(arg) for arg in node.args[:1]]
    owner = frame.evaluated(node.func.value) if isinstance(node.func, ast.Attribute) else None
    for part in given[0].split(".") if given and isinstance(given[0], str) else ():
        if not isinstance(owner, nn.Module):
            return
        yield owner, part
        owner = member_of(owner, part)


def _members_in(module: nn.Module, key: Registered) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the place of which members a module has, and those of the members."""
    yield module, key
    members = own_attributes(module).get(key.slots, ())
    yield from ((module, name) for name in [*members])


def asked_for(access: Access, value: Any, frame: Frame) -> Iterator[tuple[nn.Module, Registered]]:
    """Yield the places that an access reads of a container as a whole, or of torch's own tables.

    Args:
        access: the access.
        value: its value.
        frame: the frame that it is in.
    """
    if access.use is not Use.NONE and isinstance(value, _CONTAINERS):
        yield value, _PARAMETERS if isinstance(value, _OF_PARAMETERS) else _MODULES
    if isinstance(access.node, ast.Attribute) and access.node.attr in SLOTS:
        owner = frame.evaluated(access.node.value)
        if isinstance(owner, nn.Module):
            yield owner, Registered(access.node.attr)
