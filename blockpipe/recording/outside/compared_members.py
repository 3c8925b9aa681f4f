"""What the user's objects hold, as it is compared at each look at them.

A look comes before each operation of the user's code, so that a glance at an object's dictionary
has to say first that all is as it was.
"""

import logging
import types
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from ..._common.libraries import is_users
from ..._common.modules import MISSING, StandIn
from ...crossing.torch_patches import original_of
from ...restoring.holders import (
    CacheHolder,
    ContentHolder,
    DictHolder,
    Holder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
)
from ...restoring.model_state import names_in
from ..plain_values.evaluation.members import Names
from ..reads import NamesRead

TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_OURS = "_blockpipe_"  # attributes of tensors
_MOST_BYTES = 10_000  # of an array or a file in memory; larger ones are not compared
_AT_ONCE = 64  # objects in a comparison; if one has changed, each of them is compared
_MOST_DOTS = 3  # of a name such as torch.nn.functional.relu


def members_now(holder: Holder) -> dict[Any, Any]:
    """Return an object's members by name or key, as they are now."""
    if isinstance(holder, SequenceHolder):
        return {None: Content(tuple(member for _, member in holder.now()))}
    if isinstance(holder, CacheHolder):
        return {id(member): member for _, member in holder.now()}
    if isinstance(holder, SetHolder):
        return {member: True for _, member in holder.now()}
    if isinstance(holder, ContentHolder):
        return {None: _content(holder)}
    if isinstance(holder, SlotsHolder):
        return {slot.__name__: value for slot, value in holder.now()}
    if isinstance(holder.owner, Tensor):
        return {k: v for k, v in holder.now() if not str(k).startswith(_OURS)}
    return dict(holder.now())


def _content(holder: ContentHolder) -> Any:
    """Return what is compared: a file in memory may grow, as a list may; a numpy array may not."""
    ((_, content),) = holder.now()
    if isinstance(holder.owner, logging.Logger):
        return str(content[:2])  # the level, and whether it is disabled
    if content is None:
        return str(content)
    if isinstance(content, tuple):
        content = content[0]  # the text, without the position
    is_array = type(holder.owner).__module__ == "numpy"
    return None if len(content) > _MOST_BYTES else content if is_array else Content(tuple(content))


class ModuleHolder(Holder):
    """A module's plain attributes, its mode, a forward of its own, and its numbers of hooks."""

    def now(self) -> list[tuple[str, Any]]:
        return list(_of_module(self.owner))


class NamespacesHolder(Holder):
    """The values that a function may read from modules that are not the user's: ``F.relu``."""

    def now(self) -> list[tuple[str, Any]]:
        function = self.owner
        known = {name: function.__globals__.get(name) for name in names_in(function.__code__)}
        return [
            found
            for name, value in known.items()
            if isinstance(value, types.ModuleType)
            for found in _of_namespace(name, value, function)
        ]


def named_place(function: types.FunctionType, path: str) -> tuple[Names, str]:
    """Return the variables of the module, and the name, that a :class:`NamespacesHolder` has by a
    path: ``settings.scale``."""
    first, *between, name = path.split(".")
    module = function.__globals__[first]
    for inner in between:
        module = vars(module)[inner]
    return Names(vars(module)), name


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            yield name, len(value or ())
        elif isinstance(value, StandIn):
            if name == "forward" and value.own is not MISSING:
                yield name, value.own
        elif name not in TORCHS or name == "training":
            yield name, value


def _of_namespace(
    name: str, module: types.ModuleType, function: types.FunctionType
) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function may read from a module that it names: ``F.relu``."""
    for attribute in function.__code__.co_names:
        if attribute in vars(module):
            path, value = f"{name}.{attribute}", original_of(vars(module)[attribute])
            yield path, value
            if isinstance(value, types.ModuleType) and path.count(".") < _MOST_DOTS:
                yield from _of_namespace(path, value, function)


class Glances:
    """The values in the dictionaries of many objects, which are compared faster than members are.

    A model has thousands of objects and a forward thousands of operations, so that many
    dictionaries are compared at once.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._count = 0

    def add(self, holder: Holder) -> None:
        """Take one more object, as it is now."""
        if not self._groups or len(self._groups[-1].each) == _AT_ONCE:
            self._groups.append(_Group())
        self._groups[-1].add(self._count, _Glance(holder))
        self._count += 1

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the objects whose members have to be compared, and take them as they
        are then. Others may be added meanwhile."""
        for group in self._groups:
            is_same = group.finds_no_change()
            for number, glance in [*(group.others if is_same else group.each)]:
                if not glance.finds_no_change():
                    glance.note()
                    yield number
            if not is_same:
                group.note()


class _Group:
    """Some objects, of which those that have a dictionary are compared at once.

    Attributes:
        each: all of them, by their numbers.
        others: those that have none.
    """

    def __init__(self) -> None:
        self.each: list[tuple[int, _Glance]] = []
        self.others: list[tuple[int, _Glance]] = []

    def add(self, number: int, glance: "_Glance") -> None:
        """Take one more."""
        self.each.append((number, glance))
        if glance.found is None:
            self.others.append((number, glance))
        self.note()

    def note(self) -> None:
        """Note the values as each object has noted them."""
        glances = [glance for _, glance in self.each if glance.found is not None]
        self._found: list[dict[Any, Any]] = [glance.found for glance in glances]
        self._lengths = [len(glance.keys) for glance in glances]
        self._keys = [key for glance in glances for key in glance.keys]
        self._values = [value for glance in glances for value in glance.values]
        of_modules = [glance for glance in glances if glance.module is not None]
        self._modules = [glance.module for glance in of_modules]
        self._of_modules = [glance.found for glance in of_modules]
        self._hooks = [hooks for glance in glances for hooks in glance.hooks]
        self._counts = [count for glance in glances for count in glance.counts]

    def finds_no_change(self) -> bool:
        """Return whether all dictionaries are as they were."""
        found = self._found
        if [*map(dict.__len__, found)] != self._lengths:
            return False
        if not all(map(is_, map(vars, self._modules), self._of_modules)):
            return False
        is_same = all(map(is_, chain.from_iterable(map(dict.values, found)), self._values))
        has_same_keys = all(map(is_, chain.from_iterable(map(dict.__iter__, found)), self._keys))
        return is_same and has_same_keys and [*map(len, self._hooks)] == self._counts


class _Glance:
    """The values in an object's dictionary, if it has one.

    Args:
        holder: the object.

    Attributes:
        module: the object, if it is a module.
        found: its dictionary.
        keys: in it, as they were.
        values: in it, as they were.
        hooks: the dictionaries of hooks in it.
        counts: of hooks, as they were.
    """

    def __init__(self, holder: Holder) -> None:
        self.module: nn.Module | None = holder.owner if isinstance(holder, ModuleHolder) else None
        self.found: Any = holder.namespace() if isinstance(holder, DictHolder) else None
        self.keys, self.values = tuple[Any, ...](), tuple[Any, ...]()
        self.hooks, self.counts = list[Any](), list[int]()
        self.note()

    def note(self) -> None:
        """Note the values as they are now."""
        self.found = found = vars(self.module) if self.module is not None else self.found
        if found is not None:
            self.keys, self.values = (*dict.__iter__(found),), (*dict.values(found),)
            is_module = self.module is not None
            hooks = (found[name] for name in self.keys if is_module and name.endswith("_hooks"))
            self.hooks = [value for value in hooks if value is not None]
            self.counts = [*map(len, self.hooks)]

    def finds_no_change(self) -> bool:
        """Return whether all is as it was; otherwise, the members have to be compared."""
        found = self.found
        if found is None or dict.__len__(found) != len(self.keys):
            return False
        if self.module is not None and vars(self.module) is not found:
            return False
        is_same = all(map(is_, dict.values(found), self.values))
        has_same_keys = all(map(is_, dict.__iter__(found), self.keys))
        return is_same and has_same_keys and [*map(len, self.hooks)] == self.counts


class Content:
    """The members of a list."""

    def __init__(self, members: tuple[Any, ...]) -> None:
        self.members = members

    def starts(self, other: "Content") -> bool:
        """Return whether the other list begins with these members."""
        own, longer = self.members, other.members
        return len(own) <= len(longer) and all(map(is_same, own, longer))


def is_same(one: Any, other: Any) -> bool:
    """Whether a member is as it was: the same object, an equal number or text, or such a list."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Content):
        return one.starts(other) and other.starts(one)
    return type(one) in (int, float, str, bytes) and bool(one == other)


def is_growth(then: Any, now: Any) -> bool:
    """Whether a list has only grown, or a number has only been counted up."""
    if isinstance(then, Content) and isinstance(now, Content):
        return then.starts(now)
    return type(then) is int and type(now) is int and now > then


def unread_switches(model: nn.Module, reads: NamesRead) -> Iterator[str]:
    """Yield the switches on modules, strings and truth values, that the user's code sets and never
    reads."""
    for path, module in model.named_modules():
        if is_users(type(module).__module__):
            for name, value in vars(module).items():
                is_switch = isinstance(value, bool | str) and name not in TORCHS
                if is_switch and reads.is_unread(name, type(module)):
                    yield f"{path}.{name}"
