"""Watch the changes that a forward makes to the user's own objects while it runs.

Examples are a context manager that pushes a number on a list, a scratch dictionary, or a flag on a
class. Micro-batches under way at once would change them for each other. Objects that only collect
values are left alone.
"""

import io
import os
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.libraries import has_users_code, is_users
from ..._common.text import key_text
from ..._torch.modules import children_of, slots_of
from ...crossing.tags import TAG
from ...restoring.holders import (
    CacheHolder,
    ClassHolder,
    DictHolder,
    FunctionHolder,
    Holder,
    MemberHolder,
    NamesHolder,
    SetHolder,
    SlotsHolder,
    container_of,
    environment,
)
from ...restoring.module_holders import REMEDY as REMEDY_OF_HOOKS
from ...restoring.module_holders import HookCounts, HooksOfAll, ScriptHolder, is_of_hooks
from ...stages.cursor import is_of_microbatch
from ..calls import hops_by_path
from ..entries import SharedChange
from ..plain_values.evaluation.members import BY_ARGUMENT
from ..plain_values.places import in_words, space_of
from ..plain_values.taken_in import made_in
from ..reads import NamesRead
from ..recording import Recording
from .compared_members import (
    TORCHS,
    Content,
    Glances,
    ModuleHolder,
    NamespacesHolder,
    is_growth,
    is_same,
    members_now,
    named_place,
)

MOST_OBJECTS = 2_000  # the nearest; each is compared at every operation of the user's code
_UNSET = object()
_OF_EACH_LAYER = (
    "where each layer has a place of its own in it, use a dictionary with an entry for each layer, "
    "or an attribute of each; otherwise "
)
_REMEDY = (
    "pass it along as an argument, keep it in a local variable, or, if nothing in it is for the "
    "next micro-batch, in a dictionary with current_microbatch() as its key (each micro-batch then "
    "has an entry of its own)"
)
OWN_MODULE = "give each stage a module of its own (the parameters may be shared)"
_NAMED = (ClassHolder, FunctionHolder, NamesHolder, HooksOfAll)  # any code may read what they hold


@dataclass
class _Change:
    """A changed member of an object."""

    name: str
    path: str | None  # of the module that it is an attribute of
    is_shared: bool  # any code may read it: a global, or a variable of a closure or class
    first: Any  # the value when the forward began
    last: Any
    attribute: tuple[str, type | None] | None  # the name by which code reads it, and its class
    owner: Any
    key: Any
    hops: set[int] = field(default_factory=set)
    grown_on: set[int] = field(default_factory=set)  # hops that only added to it
    replaced_on: set[int] = field(default_factory=set)  # hops where there was another value before
    where: str = ""

    @property
    def place(self) -> tuple[Any, Any]:
        """The object, with a name or key in it; ``None`` for its content."""
        if isinstance(self.owner, types.FunctionType) and "." in str(self.key):
            return named_place(self.owner, str(self.key))
        return self.owner, None if isinstance(self.owner, set) else self.key

    @property
    def is_default(self) -> bool:
        """Whether it may be the first value of an entry, which a read has made."""
        may_make = isinstance(self.owner, defaultdict) and self.first is _UNSET
        return may_make and isinstance(self.last, bool | int | float | str) and not self.last


class OutsideState:
    """Watch the user's objects during one forward.

    Args:
        holders: the holders of all objects that can be reached from the model, the nearest first.
        modules: the model's modules, by path.
    """

    def __init__(self, holders: Collection[Holder], modules: dict[str, nn.Module]) -> None:
        torchs = {id(m) for module in modules.values() for m in _torchs_of(module)}
        self._paths = {id(module): path for path, module in modules.items()}
        near = {
            id(child): child
            for module in modules.values()
            if is_users(type(module).__module__)
            for child in (module, *children_of(module).values())
        }
        self._tensors = {
            id(tensor): (f"{path}.{name}" if path else name, tensor)
            for path, module in modules.items()
            for name, tensor in module.named_parameters(recurse=False)
        }
        self._all = holders
        self._hooks = HookCounts([m for m in modules.values() if id(m) not in near])
        self._holders: list[Holder] = [
            environment(),
            *map(ModuleHolder, near.values()),
            *(DictHolder(vars(tensor), tensor) for _, tensor in self._tensors.values()),
            *(holder for holder in holders if isinstance(holder, ScriptHolder)),
        ]
        others = {id(h.owner): h.owner for h in holders if isinstance(h.owner, nn.Module)}
        self._slots = {
            id(slots): module
            for key, module in others.items()
            if key not in self._paths
            for slots in slots_of(module)
        }
        apart = torchs | self._paths.keys() | self._tensors.keys()
        for holder in holders:
            if len(self._holders) >= MOST_OBJECTS:
                break
            if isinstance(holder, FunctionHolder) and has_users_code(holder.owner):
                self._holders.append(NamespacesHolder(holder.owner))
            if _is_watched(holder) and id(holder.owner) not in apart:
                self._holders.append(holder)
        self._known = {id(holder.owner) for holder in self._holders}
        self._first = frozenset(self._known)
        self._shared = {
            id(value) for h in self._holders if isinstance(h, _NAMED) for _, value in h.now()
        }
        self._glances = Glances()
        for holder in self._holders:
            self._glances.add(holder)
        self._members = [members_now(holder) for holder in self._holders]
        self._changes: dict[tuple[int, Any], _Change] = {}
        self._is_cached = False  # whether a cache has got an object that may change

    def look(self, hop: int) -> None:
        """Compare all objects; called when the user's code is about to run something on a hop."""
        for index in self._glances.changed():
            holder = self._holders[index]
            now, before = members_now(holder), self._members[index]
            if len(now) == len(before) and all(now[key] is before.get(key, _UNSET) for key in now):
                continue
            for key in now.keys() | before.keys():
                self._compare(holder, key, before.get(key, _UNSET), now.get(key, _UNSET), hop)
            self._members[index] = now
        for change in self._hooks.changes():
            self._compare(*change, hop)

    def _compare(self, holder: Holder, key: Any, then: Any, now: Any, hop: int) -> None:
        owner = holder.owner
        if is_same(then, now) or (isinstance(owner, dict) and is_of_microbatch(key)):
            return
        if isinstance(holder, CacheHolder):
            self._watch(now)  # the cache may change, but not the objects in it
            self._is_cached = self._is_cached or bool(made_in([now]))
            return
        change = self._changes.get((id(owner), key))
        if change is None:
            is_shared = id(owner) in self._shared or isinstance(holder, _NAMED)
            is_shared = is_shared or owner is os.environ
            name, path = self._named(holder, key), self._paths.get(id(owner))
            change = self._changes[id(owner), key] = _Change(
                *(name, path, is_shared, then, then),
                _attribute(owner, key),
                owner,
                key,
            )
        change.where = change.where or users_line()
        change.replaced_on |= set() if then is _UNSET else {max(hop, 0)}
        if is_growth(then, now):
            change.grown_on.add(max(hop, 0))
        elif not isinstance(now, Tensor) or self._replaces(holder, now):
            change.hops.add(max(hop, 0))
        change.last = now
        for member in now.members if isinstance(now, Content) else (now,):
            self._watch(member)

    def _replaces(self, holder: Holder, now: Tensor) -> bool:
        """Whether it is the parameter of a module that is none of the model's, or what a scripted
        one has made, which do not say of which micro-batch they are."""
        is_of_others = id(holder.owner) in self._slots or isinstance(holder, ScriptHolder)
        return is_of_others and getattr(now, TAG, None) is None

    def _watch(self, value: Any) -> None:
        """Watch an object that the forward has made and stored, because it may go on changing
        it."""
        holder = container_of(value)
        if holder is None and _is_object(value):
            holder = DictHolder(vars(value), value)
        if holder and id(value) not in self._known and len(self._holders) < MOST_OBJECTS:
            self._known.add(id(value))
            self._holders.append(holder)
            self._glances.add(holder)
            self._members.append(members_now(holder))

    def _named(self, holder: Holder, key: Any) -> str:
        owner = holder.owner
        if isinstance(holder, HooksOfAll):
            return str(owner)
        if id(owner) in self._tensors:
            return f"attribute {key!r} of {self._tensors[id(owner)][0]!r}"
        if isinstance(owner, types.FunctionType):
            return f"{key!r}, which {owner.__qualname__} reads"
        if owner is os.environ:
            return f"environment variable {os.fsdecode(key)!r}"
        if id(owner) in self._slots:
            return in_words(self._slots[id(owner)], key, self._paths)
        if isinstance(owner, dict):
            return f"entry {key_text(key)} of a dict"
        return in_words(owner, None if isinstance(holder, SetHolder) else key, self._paths)

    def members(self) -> Iterator[Iterable[Any]]:
        """Yield the members of each object, as they were when it was looked at last."""
        for members in self._members:
            for value in members.values():
                yield value.members if isinstance(value, Content) else (value,)

    @property
    def collects(self) -> bool:
        """Whether several hops add to one object, which the next forward may empty first, or a
        cache gets an object that the next forward finds there."""
        grown_on = (change.grown_on for change in self._changes.values())
        return self._is_cached or any(len(hops) > 1 for hops in grown_on)

    @property
    def sets(self) -> dict[int, str]:
        """The objects that were there before and have changed: by id, in words."""
        return {
            id(change.owner): f"{change.name} ({change.where})"
            for change in self._changes.values()
            if id(change.owner) in self._first
        }

    @property
    def places(self) -> set[tuple[int, Any]]:
        """The changed objects, by id, each with a name or key in it (``None`` for its content), but
        what a ``defaultdict`` has made where it was read."""
        found = (one.place for one in self._changes.values() if not one.is_default)
        return {(space_of(owner), key) for owner, key in found}

    def changed(self) -> Iterator[tuple[Any, Any, set[int], str]]:
        """Yield each changed object, a name or key in it (``None`` for its content), the hops that
        changed it, and the first line that did; of dictionaries also the hops that replaced an
        entry, for code that looks it up by an argument."""
        for change in self._changes.values():
            yield *change.place, change.hops | change.grown_on, change.where
            if isinstance(change.owner, dict):
                yield change.owner, BY_ARGUMENT, change.replaced_on, change.where

    def found(
        self,
        result: Recording,
        reads: NamesRead,
        read_on: Callable[[Tensor], set[int]],
        traced_on: Callable[[Any, Any], set[int] | None],
    ) -> Iterator[SharedChange]:
        """Yield the changes that micro-batches under way at once would make for each other.

        Args:
            result: the recording, with its hops and calls.
            reads: the names that the user's code reads.
            read_on: returns the hops that read a tensor.
            traced_on: returns the hops on which traced code reads what is at a place; ``None``:
                other code may, too.
        """
        if len(result.hops) < 2:
            return
        on = hops_by_path(result.calls)
        for change in self._changes.values():
            may_be_read = change.is_shared
            if change.path is not None:  # calls of its module read it, or code that holds that
                called = on.get(change.path, {-1})
                traced = traced_on(change.owner, change.key)
                may_be_read = not (called if traced is None else traced) <= change.hops
            if id(change.owner) in self._slots:
                used_on = set[int]().union(*map(read_on, _tensors_in(change.first)))
                may_be_read = not used_on <= change.hops
            is_put_back = bool(change.hops) and is_same(change.last, change.first)
            # An object that one hop empties or resets, and another adds to, does not only collect.
            hops = sorted(change.hops | change.grown_on if change.hops else ())
            # A hook that stays may be there once for all, or be another forward's to remove.
            stays = bool(hops) and not is_put_back and is_of_hooks(change.owner, change.key)
            if not (len(hops) > 1 or ((is_put_back or stays) and may_be_read)):
                continue
            if not self._is_unread(change, reads):
                is_of_module = id(change.owner) in self._slots
                remedy = OWN_MODULE if is_of_module else _remedy(change)
                is_last = stays and len(hops) == 1
                found = SharedChange(change.name, "sets it", hops, change.where, remedy, is_last)
                found.is_traced = is_last
                yield found

    def _is_unread(self, change: _Change, reads: NamesRead) -> bool:
        if change.attribute is not None:
            return reads.is_unread(*change.attribute)
        if not isinstance(change.owner, dict | set | list | deque):
            return False
        names = {
            key if holder.owner is not holder.namespace() else None
            for holder in self._all
            for key, value in holder.before
            if value is change.owner
        }
        return bool(names) and all(
            _is_plain_name(n) and reads.is_only_filled(str(n)) for n in names
        )


def _tensors_in(slot: Any) -> list[Tensor]:
    """Return the tensors of what a module had as a parameter, a buffer or a submodule."""
    if isinstance(slot, nn.Module):
        return [*slot.parameters(), *slot.buffers()]
    return [slot] if isinstance(slot, Tensor) else []


def _remedy(change: _Change) -> str:
    if is_of_hooks(change.owner, change.key):
        return REMEDY_OF_HOOKS
    return f"{_OF_EACH_LAYER if _has_places(change) else ''}{_REMEDY}"


def _has_places(change: _Change) -> bool:
    """Whether layers may each have an element of it: whose was set, is not known."""
    is_array = type(change.owner).__module__ == "numpy"
    return is_array or isinstance(change.owner, list | deque)


def _attribute(owner: Any, key: Any) -> tuple[str, type | None] | None:
    """Return the name by which code reads a member, and its class; ``None`` for an entry."""
    if isinstance(owner, dict) or not isinstance(key, str) or not key.isidentifier():
        return None
    if isinstance(owner, types.FunctionType):
        return key, None
    kind = owner if isinstance(owner, type) else type(owner)
    return (key, kind) if is_users(kind.__module__) and key not in TORCHS else None


def _is_plain_name(name: Any) -> bool:
    """Whether code reads it by this name only. Python itself reads ``__kwdefaults__``."""
    return isinstance(name, str) and not name.startswith("__")


def _torchs_of(module: nn.Module) -> Iterator[Any]:
    """Yield the dictionaries that torch keeps in every module."""
    yield from (value for name, value in vars(module).items() if name in TORCHS)


def _is_watched(holder: Holder) -> bool:
    kind = type(holder.owner)
    if isinstance(holder, MemberHolder) or holder.is_data:
        return False  # only traced code sets it; no forward changes a data set
    if issubclass(kind, io.IOBase) and not issubclass(kind, io.StringIO | io.BytesIO):
        return False  # it has a position, and is asked for no content
    is_exception = issubclass(kind, BaseException)
    return not isinstance(holder, SlotsHolder) or is_exception or is_users(kind.__module__)


def _is_object(value: Any) -> bool:
    """Whether it is an instance of a user's class."""
    kind = type(value)
    is_module = isinstance(value, nn.Module | Tensor | type)
    return not is_module and is_users(kind.__module__) and hasattr(value, "__dict__")
