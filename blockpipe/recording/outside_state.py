"""What a forward changes outside of its modules while it runs: the user's own objects.

A context manager that pushes a number on a list, a scratch dictionary, a flag on a class: micro-
batches under way at once would change it for each other. What is only collected is left alone.
"""

import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.modules import StandIn
from ..restoring.model_state import is_users, names_in, slot_members
from .reads import Reads
from .recording import Recording, SharedChange

MOST_OBJECTS = 2_000  # the nearest: each is looked at for every operation of the user's code
TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_MOST_BYTES = 10_000  # of an array whose values are looked at
_MOST_DOTS = 3  # of a name such as torch.nn.functional.relu
_UNSET = object()
_REMEDY = "pass it along as an argument, or keep it in a local variable"


@dataclass
class _Change:
    """One member of one object, changed."""

    name: str
    path: str | None  # of the module that it is an attribute of
    is_shared: bool  # whether any code may read it: a global, a closure's variable, a class's
    first: Any  # what was there when the forward began
    last: Any
    attribute: tuple[str, type | None] | None  # its name, and whose, if any code reads it by that
    hops: set[int] = field(default_factory=set)
    grown_on: set[int] = field(default_factory=set)  # hops that only added to it
    where: str = ""


class OutsideState:
    """Watches the user's objects during one forward.

    Args:
        objects: all that can be reached from the model, the nearest first.
        modules: the model's, by path.
    """

    def __init__(self, objects: Iterable[Any], modules: dict[str, nn.Module]) -> None:
        inner = {id(vars(module)) for module in modules.values()}
        for module in modules.values():
            inner |= {id(value) for name, value in vars(module).items() if name in TORCHS}
        self._paths = {id(module): path for path, module in modules.items()}
        near = {
            id(child): child
            for module in modules.values()
            if is_users(type(module).__module__)
            for child in (module, *module.children())
        }
        inner |= near.keys()  # looked at as modules
        objects = list(objects)
        self._owners = {id(vars(one)): one for one in objects if hasattr(one, "__dict__")}
        found = [value for value in objects if id(value) not in inner and _is_watched(value)]
        self._objects = [os.environ, *near.values(), *found[:MOST_OBJECTS]]
        self._shared = {id(value) for one in self._objects for value in _said_anywhere(one)}
        self._members = [dict(_members(value)) for value in self._objects]
        self._changes: dict[tuple[int, Any], _Change] = {}

    def look(self, hop: int) -> None:
        """The user's code is about to run something on a hop."""
        for index, value in enumerate(self._objects):
            now, before = dict(_members(value)), self._members[index]
            if len(now) == len(before) and all(now[key] is before.get(key, _UNSET) for key in now):
                continue
            for key in now.keys() | before.keys():
                self._compare(value, key, before.get(key, _UNSET), now.get(key, _UNSET), hop)
            self._members[index] = now

    def _compare(self, value: Any, key: Any, then: Any, now: Any, hop: int) -> None:
        if _is_same(then, now):
            return
        change = self._changes.get((id(value), key))
        if change is None:
            is_shared = id(value) in self._shared or isinstance(value, type | types.FunctionType)
            name, path = self._named(value, key), self._paths.get(id(value))
            change = self._changes[id(value), key] = _Change(
                *(name, path, is_shared, then, then), self._attribute(value, key)
            )
        if _is_growth(then, now):
            change.grown_on.add(max(hop, 0))
        elif not isinstance(now, Tensor):
            change.hops.add(max(hop, 0))
            change.where = change.where or users_line()
        change.last = now

    def _named(self, value: Any, key: Any) -> str:
        if isinstance(value, nn.Module):
            path = self._paths.get(id(value), "")
            return f"{path}.{key}" if path else f"attribute {key!r} of the model"
        if isinstance(value, types.FunctionType):
            return f"{key!r}, which {value.__qualname__} reads"
        if isinstance(value, type):
            return f"{value.__qualname__}.{key}"
        if isinstance(value, dict):
            return f"entry {key!r} of a dict"
        if isinstance(value, list | deque):
            return f"a {type(value).__name__}"
        return f"attribute {key!r} of a {type(value).__name__}"

    def _attribute(self, value: Any, key: Any) -> tuple[str, type | None] | None:
        """By which name code reads a member; of an entry, or an element, it needs none."""
        if isinstance(value, dict):
            value = self._owners.get(id(value))
        if not isinstance(key, str) or not key.isidentifier():
            return None
        if isinstance(value, types.FunctionType):
            return key, None
        kind = value if isinstance(value, type) else type(value)
        return (key, kind) if is_users(kind.__module__) and key not in TORCHS else None

    @property
    def collects(self) -> bool:
        """Whether several hops add to something: the next forward may empty it first."""
        return any(len(change.grown_on) > 1 for change in self._changes.values())

    def found(self, result: Recording, reads: Reads) -> Iterator[SharedChange]:
        """What micro-batches under way at once would change for each other.

        Args:
            result: with its hops and calls.
            reads: what the user's code reads of it.
        """
        if len(result.hops) < 2:
            return
        on: dict[str, set[int]] = {}
        for call in result.calls:
            if call.hop is not None:
                last = call.hop if call.last_hop is None else call.last_hop
                on.setdefault(call.path, set()).update(range(call.hop, last + 1))
        for change in self._changes.values():
            may_be_read = change.is_shared
            if change.path is not None:  # it is read where its module is called, or by who holds it
                may_be_read = not on.get(change.path, {-1}) <= change.hops
            is_put_back = bool(change.hops) and _is_same(change.last, change.first)
            # What one hop empties, or sets back, and another one adds to, is not only collected.
            hops = sorted(change.hops | change.grown_on if change.hops else ())
            if not (len(hops) > 1 or (is_put_back and may_be_read)):
                continue
            if change.attribute is None or not reads.is_unread(*change.attribute):
                yield SharedChange(change.name, "sets it", hops, change.where, _REMEDY)


def _is_watched(value: Any) -> bool:
    if isinstance(value, dict | list | deque | types.FunctionType):
        return True
    if isinstance(value, type):
        return is_users(value.__module__)
    if isinstance(value, nn.Module | Tensor):
        return False
    return is_users(type(value).__module__) or type(value) is _ndarray()


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds, each under a name."""
    if isinstance(value, dict):
        yield from [(key, dict.__getitem__(value, key)) for key in dict.__iter__(value)]
    elif value is os.environ:
        yield from os.environ.items()
    elif isinstance(value, list | deque):
        yield None, _Content(tuple(value))
    elif isinstance(value, types.FunctionType):
        yield from _read(value)
    elif isinstance(value, type):
        yield from [(k, v) for k, v in vars(value).items() if not k.startswith("__")]
    elif isinstance(value, nn.Module):
        yield from _of_module(value)
    elif type(value).__module__ == "numpy":
        yield None, value.tobytes() if value.nbytes <= _MOST_BYTES else None
    else:
        yield from vars(value).items() if hasattr(value, "__dict__") else ()
        for slot in slot_members(type(value)):
            if hasattr(value, slot.__name__):
                yield slot.__name__, getattr(value, slot.__name__)


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's plain attributes, its mode, its forward where it is not its class's, and how many
    hooks of each kind it has."""
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            yield name, len(value or ())
        elif name == "forward" and isinstance(value, StandIn):
            yield name, None
        elif name not in TORCHS or name == "training":
            yield name, value


def _read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads from around it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    if is_users(function.__module__):
        for name in names_in(function.__code__):
            value = function.__globals__.get(name, _UNSET)
            if value is not _UNSET:
                yield name, value
            if isinstance(value, types.ModuleType):
                yield from _of_namespace(name, value, function)


def _of_namespace(
    name: str, module: types.ModuleType, function: types.FunctionType
) -> Iterator[tuple[str, Any]]:
    """What a function may read from a module that it knows: ``F.relu``."""
    for attribute in function.__code__.co_names:
        if attribute in vars(module):
            path, value = f"{name}.{attribute}", vars(module)[attribute]
            yield path, value
            if isinstance(value, types.ModuleType) and path.count(".") < _MOST_DOTS:
                yield from _of_namespace(path, value, function)


def _said_anywhere(value: Any) -> Iterator[Any]:
    """Containers and objects that functions read by name, or classes hold."""
    if isinstance(value, types.FunctionType | type):
        yield from (member for _, member in _members(value))


def _ndarray() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "ndarray", None)


class _Content:
    """The members of a list."""

    def __init__(self, members: tuple[Any, ...]) -> None:
        self.members = members

    def starts(self, other: "_Content") -> bool:
        """Whether the other one begins with these."""
        own, longer = self.members, other.members
        return len(own) <= len(longer) and all(map(_is_same, own, longer))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, _Content):
        return one.starts(other) and other.starts(one)
    return type(one) in (int, float, str, bytes) and bool(one == other)


def _is_growth(then: Any, now: Any) -> bool:
    """Whether something has only collected more, or counted up."""
    if isinstance(then, _Content) and isinstance(now, _Content):
        return then.starts(now)
    return type(then) is int and type(now) is int and now > then
