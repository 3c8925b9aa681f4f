"""Questions about the places that plain values are in: their names, and what they hold."""

from __future__ import annotations

import ast
import enum
import gc
import io
import itertools
import mmap
import os
import types
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.nested import tensors
from ..._common.text import key_text
from ..._torch.modules import buffers_of, children_of, parameters_of, slots_of
from ...crossing.tags import TAG, latest
from ...restoring.contents import is_of_c
from ...restoring.holders import DictHolder, Holder
from ...restoring.iterators import BOUND, advances
from ...stages.cursor import is_of_microbatch
from .arrays import is_array
from .evaluation.by_call import ASKS
from .evaluation.expressions import Frame
from .evaluation.loops import run_over
from .evaluation.members import (
    ALL,
    BY_ARGUMENT,
    UNKNOWN,
    Names,
    Registered,
    is_one_of,
    own_attributes,
)
from .evaluation.registered import asked_for
from .syntax.accesses import Access
from .syntax.effects import DOES_BOTH, WRITES
from .syntax.protocols import is_read_by_syntax
from .syntax.uses import Use

CONTENTS = (
    *(list, dict, set, deque, bytearray, array, io.StringIO, ContextVar),
    mmap.mmap,
)

CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_MOST_NESTED, _MOST_INSIDE = 4, 64  # of the containers in an object: guesses
_HAND_BACK = ("torch", __name__.partition(".")[0])
_SHARE_MEMORY = (
    *(torch.from_numpy, torch.as_tensor, torch.asarray, torch.frombuffer),
    torch.utils.dlpack.from_dlpack,
)

_NO_METHODS = ("builtins", "abc", "typing", "enum", *_HAND_BACK)  # that read what objects hold


# Functions that read a container, and nothing in what it holds.
_TAKE_AS_IT_IS = (len, bool, iter, list, tuple, reversed, dict)


def is_by_microbatch(container: Any) -> bool:
    """Return whether a dictionary has an entry for each micro-batch: they share none of it."""
    if not isinstance(container, dict):
        return False
    keys = [*dict.__iter__(container)]  # past methods of the user's
    return bool(keys) and all(map(is_of_microbatch, keys))


def attribute_of(owner: Any, key: Any) -> tuple[str, type | None] | None:
    """Return the name by which code reads a value, and the class of its owner (``None`` for a
    variable); an entry or an element has no name."""
    if isinstance(owner, CONTENTS) or not isinstance(key, str) or not key.isidentifier():
        return None
    if isinstance(owner, nn.ModuleDict) and key in children_of(owner):
        return None
    if isinstance(owner, Names | types.CellType):
        return key, None
    return key, owner if isinstance(owner, type) else type(owner)


def entry_of(access: Access, frame: Frame, owner: Any, key: Any) -> tuple[Any, Any, Access]:
    """Return the object, the key and the access that an access is in code that does not run: of a
    dictionary's entry, if a method takes that, and by an argument, if its key is not known."""
    if access.key is not None and isinstance(value := frame.evaluated(access.node), dict):
        owner, key = value, frame.key(access.key)
        sets = access.use.changes
        access = replace(access, use=Use.NONE, reads=access.use is not Use.WRITE, writes=sets)
    return owner, BY_ARGUMENT if key is UNKNOWN and access.reads else key, access


def owners_by_space(holders: Iterable[Holder], modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return objects and modules by the ids of the dictionaries that their attributes are in."""
    found = {
        id(space): holder.owner
        for holder in holders
        if isinstance(holder, DictHolder) and (space := holder.namespace()) is not holder.owner
    }
    for module in modules:
        found |= {id(vars(tensor)): tensor for _, tensor in _held_by(module)}
        found |= {id(space): module for space in slots_of(module)}
    return found


def names_of(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the names of modules, and of their parameters and buffers, by their ids, given the
    modules by path."""
    own = [(path, m) for path, m in modules.items() if not isinstance(m, torch.jit.ScriptModule)]
    names = {
        id(tensor): f"{path}.{name}" if path else name
        for path, module in own
        for name, tensor in _held_by(module)
    }
    return names | {id(module): path for path, module in modules.items()}


def _held_by(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of a module's parameters and buffers, and these."""
    held = itertools.chain(parameters_of(module).items(), buffers_of(module).items())
    yield from ((name, tensor) for name, tensor in held if tensor is not None)


def entry_asked(access: Access, frame: Frame) -> Any:
    """Return the key of the one entry that code asks a container for (``table.get(key)``, ``key in
    table``) or changes (``table.setdefault(key, [])``, ``seen.add(key)``); ``ALL``: any."""
    if access.key is None or not isinstance(frame.evaluated(access.node), dict | set):
        return ALL
    key = frame.key(access.key)
    return ALL if key is UNKNOWN else key


def sets_entry(access: Access, value: Any, *, is_over: bool) -> bool:
    """Return whether a method sets the one entry that it is asked for, and changes no other.

    Args:
        access: the access of a container, with the method.
        value: the container.
        is_over: whether the call has come: before it, an entry that is deleted, or set by one of
            several names, is there as it was.
    """
    if isinstance(value, set) or access.method == "setdefault":
        return True
    is_other = access.method in ("update", "__setitem__", "__delitem__")
    return is_other and is_over and not isinstance(value, Counter)  # whose update adds


def hops_at(places: Mapping[tuple[int, Any], Iterable[int]], owner: Any, key: Any) -> set[int]:
    """Return the hops that a recording has for a place, and for the content that it is in.

    Args:
        places: the hops, by the ids of objects with names or keys; of a content ``None``.
        owner: the object.
        key: the name or key.
    """
    if isinstance(owner, types.FunctionType):  # a variable, which several functions read
        return {hop for (_, name), hops in places.items() if name == key for hop in hops}
    return {hop for one in (key, None) for hop in places.get((id(owner), one), ())}


def in_words(owner: Any, key: Any, paths: Mapping[int, str]) -> str:
    """Return a name for a member of an object.

    Args:
        owner: the object.
        key: the name or key of the member; ``None`` for the object as a whole.
        paths: the path of each module, by its id.
    """
    if id(owner) in paths:
        path = paths[id(owner)]
        if key is None:
            return path or "the model"
        return f"{path}.{key}" if path else f"attribute {key!r} of the model"
    if isinstance(owner, type):
        return owner.__qualname__ if key is None else f"{owner.__qualname__}.{key}"
    kind = type(owner).__name__
    is_vowel = kind[0].lower() in "aeiou" or kind == "ndarray"
    whole = f"{'an' if is_vowel else 'a'} {kind}"
    what = "entry" if isinstance(owner, CONTENTS) else "attribute"
    return whole if key is None else f"{what} {key_text(key)} of {whole}"


def named(owner: Any, key: Any, paths: Mapping[int, str]) -> str:
    """Return the name of a value for an error.

    Args:
        owner: the object that holds it.
        key: its key there.
        paths: the path of each module, by its id.
    """
    if isinstance(owner, Names):
        module = owner.names.get("__name__")
        return f"a variable of {module}" if key is ALL else f"{module}.{key}"
    if isinstance(owner, types.CellType):
        return f"variable {key!r} of a closure"
    if isinstance(key, Registered):
        return f"which {key} {in_words(owner, None, paths)} has"
    return in_words(owner, None if key is ALL or key is BY_ARGUMENT else key, paths)


def is_of_module(node: ast.expr, code: types.CodeType) -> bool:
    """Return whether an expression of a function begins with a global variable, so that its value
    outlives the call."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return isinstance(node, ast.Name) and node.id not in own


def space_of(owner: Any) -> int:
    """Return the number by which an object is known; a module's variables have one for all
    readers."""
    return id(owner.names if isinstance(owner, Names) else owner)


def has_memory(value: Any) -> bool:
    """Return whether a value is an array, or bytes, whose memory a tensor may share."""
    return is_array(value) or isinstance(value, bytearray | array | memoryview | mmap.mmap)


def is_content(value: Any) -> bool:
    """Return whether a value has content that code changes in place: a container, an array, numbers
    of C, or a file that is read."""
    if isinstance(value, CONTENTS) or is_array(value) or is_of_c(value):
        return True
    return isinstance(value, io.IOBase) and value.readable()


def is_used_whole(value: Any, access: Access, *, is_still: bool) -> bool:
    """Return whether an object is read as a whole, by code that is not looked into. The user's own
    methods are.

    Args:
        value: the object.
        access: the access that reads it.
        is_still: whether the code does not run, so that nobody compares attributes.
    """
    if is_still and is_of_library(value):
        return True
    is_used = access.use is Use.READ and not access.calls
    if is_still and is_used and is_read_by_syntax(value):
        return True
    if not _is_users_object(value) or access.use is not Use.READ:
        return False
    return access.given_to is not None or _is_inherited(type(value), access.method)


def _is_inherited(kind: type, method: str) -> bool:
    """Return whether a class of the user's has a method from a library's, which may read all."""
    base = next((base for base in kind.__mro__ if method in vars(base)), object)
    return str(base.__module__).partition(".")[0] not in _NO_METHODS and not is_users(
        base.__module__
    )


def _is_users_object(value: Any) -> bool:
    return is_users(type(value).__module__) and not isinstance(value, nn.Module | type | enum.Enum)


def is_of_library(value: Any) -> bool:
    """Return whether a value is an object whose methods are a library's, or Python's; of a class of
    the user's, whether it inherits some."""
    kind = type(value)
    if kind is types.MappingProxyType:
        return True
    is_other = isinstance(value, (*CODE, nn.Module, Tensor)) or value is os.environ
    others = [base.__module__ for base in kind.__mro__ if not is_users(base.__module__)]
    inherits = any(name.partition(".")[0] not in _NO_METHODS for name in others)
    is_librarys = inherits or not is_users(kind.__module__)
    return not is_other and hasattr(value, "__dict__") and is_librarys


def inside(value: Any) -> Iterator[Any]:
    """Yield the containers and arrays in which a library's object, or a container, keeps what it
    holds."""
    level, seen = [value], {id(value)}
    for _ in range(_MOST_NESTED):
        level = [member for outer in level for member in _members_of(outer)]
        level = [member for member in level if id(member) not in seen][:_MOST_INSIDE]
        seen.update(map(id, level))
        yield from (one for one in level if isinstance(one, CONTENTS) or is_array(one))


def read_inside(access: Access, value: Any, owner: Any, frame: Frame) -> Iterator[tuple[Any, Any]]:
    """Yield what an access reads beside its own place, with the keys: of a container of modules
    which there are, and the containers in what it hands to code that nobody looks into: an object
    of a library to the library's, or a container to any.

    Args:
        access: the access.
        value: its value.
        owner: the object that holds it.
        frame: the frame that it is in.
    """
    yield from asked_for(access, value, frame)
    behind = (one for one in run_over(value) if isinstance(one, CONTENTS) or is_array(one))
    yield from ((one, ALL) for one in behind)
    is_entry = isinstance(access.node, ast.Subscript)
    if is_entry and is_of_library(owner):  # whose own method gives it
        yield from ((one, ALL) for one in inside(owner))
    function = None if access.given_to is None else frame.evaluated(access.given_to)
    is_traced = access.given_to is not None and is_looked_into(function)
    if is_traced or access.use in (Use.NONE, Use.WRITE):
        return
    held = owner if is_entry and value is UNKNOWN else value  # it may be any of them
    if is_of_library(held) or _is_opened(access, held, frame):
        yield from ((one, ALL) for one in inside(held))
    elif _is_users_object(held) and _takes_apart(function):
        # All that the object has: dataclasses.astuple(state).
        yield from ((one, ALL) for one in inside([*own_attributes(held).values()]))


def _is_opened(access: Access, held: Any, frame: Frame) -> bool:
    """Return whether code looks into a container without naming what is in it: any function that
    nobody looks into, but those that take what is in it as it is."""
    if not isinstance(held, (*CONTENTS, tuple)):
        return False
    if access.given_to is not None:
        return frame.evaluated(access.given_to) not in _TAKE_AS_IT_IS
    if isinstance(held, dict):  # what asks for a key, or for each, looks at no value
        return isinstance(access.opened_by, ast.Compare) and access.key is None
    by = access.opened_by
    return by is not None and not (isinstance(by, ast.expr) and is_looked_into(frame.evaluated(by)))


def _takes_apart(function: Any) -> bool:
    """Return whether a function is of Python's library, or another one, and not of torch's, which
    hand the user's objects to the user's code; or in C, and makes a text or bytes of an object."""
    package = str(getattr(function, "__module__", None)).partition(".")[0]
    is_pythons = isinstance(function, types.FunctionType) and package not in _HAND_BACK
    makes_text = is_one_of(function, (str, repr, format)) or package in ("_pickle", "_json")
    return is_pythons or makes_text


def _members_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | deque):
        return value
    if type(value) is types.MappingProxyType:
        return gc.get_referents(value)
    return vars(value).values() if is_of_library(value) else ()


def shares_memory(function: Any) -> bool:
    """Return whether a function makes a tensor that has the memory of an array, which autograd may
    save."""
    return torch.is_grad_enabled() and is_one_of(function, _SHARE_MEMORY)


def is_looked_into(function: Any) -> bool:
    """Return whether a function's own code is traced, or it asks for nothing that changes."""
    if is_one_of(function, ASKS):
        return True
    if isinstance(function, nn.Module):
        function = type(function)
    applied = getattr(function, "__self__", None)  # of ``Custom.apply``
    if isinstance(applied, type) and issubclass(applied, torch.autograd.Function):
        function = applied
    if isinstance(function, types.FunctionType | types.MethodType | type):
        return is_users(function.__module__)
    return False


def used_by(access: Access, value: Any, owner: Any, frame: Frame) -> Iterator[tuple[Use, Any]]:
    """Yield the containers that an access uses without naming them, each with its use: by a bound
    method that has a name of its own (``push(x)``); and in code that does not run, those inside of
    a library's object whose method may change them, and a ``defaultdict`` that may get any entry.

    Args:
        access: the access.
        value: its value, such as the method.
        owner: the object that holds it.
        frame: the frame that it is in.
    """
    held = value.__self__ if isinstance(value, BOUND) else None
    if access.given_to is access.node and (is_content(held) or advances(held)):
        is_write = value.__name__ in WRITES
        yield Use.BOTH if value.__name__ in DOES_BOTH else Use.WRITE if is_write else Use.READ, held
    if frame.is_running:
        return
    if access.use.changes and is_of_library(value):
        yield from ((access.use, one) for one in inside(value))
    if access.writes and isinstance(access.node, ast.Subscript) and is_of_library(owner):
        yield from ((Use.WRITE, one) for one in inside(owner))
    node = access.node if access.reads and isinstance(owner, defaultdict) else None
    if isinstance(node, ast.Subscript) and frame.key(node.slice) is UNKNOWN:
        yield Use.BOTH, owner


def makes_entry(owner: Any, key: Any, frame: Frame) -> bool:
    """Return whether a read of an entry, in code that does not run, gives a ``defaultdict`` one."""
    is_known = isinstance(owner, defaultdict) and key is not ALL and key is not BY_ARGUMENT
    return not frame.is_running and is_known and not dict.__contains__(owner, key)


def has_tensors(value: Any) -> bool:
    """Return whether a value carries tensors: they say themselves which micro-batch they are of."""
    return any(True for _ in tensors_in(value))


def makers_of(value: Any) -> set[int] | None:
    """Return the stages that made the tensors that a value carries; ``None`` if it carries none, or
    one that does not say which micro-batch it is of. What was computed from no tensor counts, too:
    a number that it was made of may follow from one."""
    found = [(tensor, getattr(tensor, TAG, None)) for tensor in tensors_in(value)]
    if not found or any(tag is None for _, tag in found):
        return None
    newest = [latest(tensor, tag)[1] for tensor, tag in found if tag is not None]
    return {tag.stage for tag in newest}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value carries, also as attributes."""
    inside = getattr(value, "__dict__", None)
    return tensors([value, *inside.values()] if isinstance(inside, dict) else value)
