"""Attributes of which classes tell, while a step runs, when they are set or read.

A proxy for the objects was no alternative: the user's code compares them by identity.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..._common.threads.own_members import ABSENT, stand_in, stands_no_more
from ..._common.threads.process_changes import ProcessChange
from ..._torch.modules import buffers_of, children_of, parameters_of
from ...recording.entries import UsedAttribute
from ...stages.cursor import current_cursor

_SET, _DELETE = "__setattr__", "__delattr__"
_ADD = ("add_module", "register_parameter", "register_buffer")  # to a module


class KnownAttributes:
    """The attributes that a recorded forward sets or reads.

    Args:
        attributes: these, with the stages that use them.
    """

    def __init__(self, attributes: Iterable[UsedAttribute]) -> None:
        self._places = dict[tuple[int, str | None], UsedAttribute]()
        counted = defaultdict[int, set[int]](set)
        found = [(one, owner) for one in attributes if (owner := one.object) is not None]
        for one, owner in found:
            self._places[one.place] = one
            counted[id(owner)] |= one.counted_on
        # Python does not switch threads inside of ``self.n += 1``, but it may where code of ours
        # runs: stages that count in one object would lose what others count.
        kinds = {type(owner) for _, owner in found if len(counted[id(owner)]) > 1}
        shared = {base for kind in kinds for base in kind.__mro__}
        changes = dict[ProcessChange, None]()
        for one, owner in found:
            is_shared = type(owner) in shared and not isinstance(owner, nn.Module)
            changes |= dict.fromkeys(_changes_for(owner, one, tells_sets=not is_shared))
        self.changes = [*changes]
        """The changes of their objects' classes, to be entered while a step runs."""

    def of(self, owner: object, key: str) -> UsedAttribute | None:
        """Return an object's attribute, if the forward uses it."""
        found = self._places.get((id(owner), key))
        if found is None and not key.startswith("_"):
            found = self._places.get((id(owner), None))
        return found if found is not None and found.object is owner else None


def _changes_for(
    owner: object, used: UsedAttribute, *, tells_sets: bool
) -> Iterator[ProcessChange]:
    """Yield the changes by which a class tells of an attribute. Reads are told where a stage sets
    what they find, and does not count there."""
    kind = type(owner)
    told = _changes.setdefault(kind, {})
    if (
        kind is not nn.Module and tells_sets
    ):  # Python would set them in each of its subclasses, in each step
        yield told.setdefault(_SET, _ToldSets(kind, _SET))
    if isinstance(owner, nn.Module):
        if kind is not nn.Module:
            yield told.setdefault(_DELETE, _ToldSets(kind, _DELETE))
        for name in _ADD:
            yield _changes.setdefault(nn.Module, {}).setdefault(name, _ToldSets(nn.Module, name))
    if used.set_on and used.key is not None and (tells_sets or not used.counted_on):
        yield told.setdefault(used.key, _ToldReads(kind, used.key))


class _Told(ProcessChange):
    """A member of a class that is another one meanwhile.

    Args:
        kind: the class.
        name: of the member.
    """

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = weakref.ref(kind), name
        self._own = self._instead = ABSENT

    def instead(self, kind: type) -> Any:
        """Return what stands there meanwhile."""
        raise NotImplementedError

    def put_on(self) -> None:
        """Put it there, if the class can have another one."""
        if (kind := self._kind()) is not None:
            # Before it is put there: an interrupt may come in between.
            self._own, self._instead = vars(kind).get(self._name, ABSENT), self.instead(kind)
            stand_in(self._instead, self._own)
            with contextlib.suppress(TypeError):  # a structure of C
                type.__setattr__(kind, self._name, self._instead)

    def take_off(self) -> None:
        """Put back what was there, unless the user's code has put something else there."""
        kind = self._kind()
        if kind is not None and vars(kind).get(self._name) is self._instead:
            if self._own is ABSENT:
                type.__delattr__(kind, self._name)
            else:
                type.__setattr__(kind, self._name, self._own)
        stands_no_more(self._instead)


class _ToldSets(_Told):
    """A class whose objects tell when one of its methods sets an attribute."""

    def instead(self, kind: type) -> Any:
        original: Callable[..., None] = getattr(kind, self._name)

        @functools.wraps(original)
        def set_attribute(owner: Any, name: str, *value: Any, **options: Any) -> None:
            cursor = current_cursor()
            uses = None if cursor is None else cursor.uses
            is_set = None if uses is None else uses.sets(owner, name)
            original(owner, name, *value, **options)
            if is_set is not None:
                is_set()

        return set_attribute


class _ToldReads(_Told):
    """A class whose objects tell when one of their attributes is read."""

    def instead(self, kind: type) -> Any:
        found = (vars(base)[self._name] for base in kind.__mro__ if self._name in vars(base))
        return _Member(self._name, next(found, ABSENT))


class _Member:
    """Stands for an attribute that objects have themselves.

    Args:
        name: of the attribute.
        default: what the class has for it.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._name, self.default = name, default
        self._is_data = hasattr(type(default), "__set__")  # a slot, or a property

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is not None:
            cursor = current_cursor()
            if cursor is not None and cursor.uses is not None:
                cursor.uses.reads(owner, self._name)
            if not self._is_data and self._name in (own := _own_members(owner)):
                return own[self._name]
        if self.default is ABSENT:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        get = getattr(type(self.default), "__get__", None)
        return self.default if get is None else get(self.default, owner, kind)

    def __set__(self, owner: Any, value: Any) -> None:
        if self._is_data:
            self.default.__set__(owner, value)
        else:
            _own_members(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        if self._is_data:
            self.default.__delete__(owner)
        elif _own_members(owner).pop(self._name, ABSENT) is ABSENT:
            raise AttributeError(self._name)


def own_value(owner: object, key: str) -> Any:
    """Return an attribute of an object's own, without running code of the user's: what is in a
    module, a slot's value; what no attribute is, if it has none."""
    own = _own_members(owner)
    if key in own:
        return own[key]
    if isinstance(owner, nn.Module):
        return part_of(owner, key)
    found = (vars(kind)[key] for kind in type(owner).__mro__ if key in vars(kind))
    slot = next(found, None)
    slot = slot.default if isinstance(slot, _Member) else slot
    try:
        return slot.__get__(owner) if isinstance(slot, types.MemberDescriptorType) else ABSENT
    except AttributeError:
        return ABSENT


def part_of(module: nn.Module, key: str) -> Any:
    """Return a module's child, parameter or buffer of a name; what nothing is, if it has none."""
    for slots in (children_of, parameters_of, buffers_of):
        if key in (held := slots(module)):
            return held[key]
    return ABSENT


def _own_members(owner: object) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found


_changes = weakref.WeakKeyDictionary[type, dict[str, _Told]]()
