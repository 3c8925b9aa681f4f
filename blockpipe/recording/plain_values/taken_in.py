"""Take what lies beyond the model's reach among the objects that a recording puts back.

A library's modules, classes and objects are not walked through: that would take long, and put back
the library's own caches. What the user's code sets there (``torch.calls = 1``, ``sys.path.append``)
is seen when the code is traced, just before it is set.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..._common.libraries import is_users
from ...crossing.torch_patches import original_of
from ...restoring.contents import content_of
from ...restoring.holders import AttributesHolder, Holder, MemberHolder, attributes_of, container_of
from .arrays import is_array
from .evaluation.expressions import Frame
from .evaluation.members import ALL, UNKNOWN, Names
from .places import inside
from .syntax.accesses import Access

_NOT_HELD = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(type, nn.Module, Tensor, bool, int, float, complex, str, bytes, type(None), tuple),
)
_MOST_MADE = 2_000  # a guess


def made_since(holders: Iterable[Holder]) -> list[Holder]:
    """Return the holders of what a forward has made meanwhile, and left in the objects of others:
    the containers, the arrays, and the objects of the user's classes."""
    seen = {id(holder.owner) for holder in holders}
    seen |= {id(space) for holder in holders if (space := holder.namespace()) is not None}
    return made_in((value for holder in holders for value in _new_in(holder)), seen)


def _new_in(holder: Holder) -> Iterator[Any]:
    before = {id(value) for _, value in holder.before}
    return (value for _, value in holder.now() if id(value) not in before)


def made_in(values: Iterable[Any], seen: Collection[int] = ()) -> list[Holder]:
    """Return the holders of the containers, arrays and objects among some values, and inside of
    them.

    Args:
        values: the values.
        seen: the ids of those that are left out.
    """
    level, known, found = [*values], {*seen}, list[Holder]()
    alive = []  # so that no other object gets an id
    while level and len(found) < _MOST_MADE:
        alive.append(level)
        new = {id(value): value for value in level if id(value) not in known}
        known |= new.keys()
        made = [*filter(None, map(_holder_of, new.values()))]
        found += made
        level = [value for holder in made for _, value in holder.before]
        level += [member for value in new.values() if type(value) is tuple for member in value]
    return found


def _holder_of(value: Any) -> Holder | None:
    is_object = is_users(type(value).__module__) and not isinstance(value, _NOT_HELD)
    attributes = attributes_of(value) if is_object else None
    if isinstance(attributes, dict) and container_of(value) is None:
        return AttributesHolder(attributes, value)
    return container_of(value) or (content_of(value) if is_array(value) else None)


class TakenIn:
    """Watch what one traced forward sets.

    Args:
        holders: the holders of all objects that are put back; others are added.
        lasting: the objects that outlive the forward, by id; as ``holders``.
    """

    def __init__(self, holders: list[Holder], lasting: set[int]) -> None:
        self._holders, self._lasting = holders, lasting
        self._spaces = {id(space) for h in holders if (space := h.namespace()) is not None}
        self._names: set[tuple[int, Any]] = set()  # of modules and classes
        self._beyond: dict[int, Any] = {}  # objects that are reached by way of these; kept alive

    def note(self, access: Access, frame: Frame, owner: Any, value: Any) -> None:
        """Look at an access before its instruction runs.

        Args:
            access: what the instruction reads or sets.
            frame: the frame that is about to run it.
            owner: the object that holds the value.
            value: the value.
        """
        if access.writes:
            self._sets(*frame.place_of(access))
            return
        if owner is not None and self._leads_beyond(owner, value) and id(value) not in self._beyond:
            self._beyond |= {id(one): one for one in (value, *inside(value))}
        if access.use.changes:
            self._changes(value)

    def sets(self, places: Iterable[tuple[Any, Any, Any]]) -> None:
        """Look at what a call sets by names, before it does: objects, names, and the values."""
        for owner, key, _ in places:
            self._sets(owner, key)

    def may_take(self, value: Any) -> bool:
        """Return whether it is an object beyond the model's reach that may be taken in."""
        return id(value) in self._beyond

    def forget(self) -> None:
        """Keep nothing alive that is not to be put back."""
        self._beyond.clear()

    def _leads_beyond(self, owner: Any, value: Any) -> bool:
        if value is UNKNOWN or isinstance(value, _NOT_HELD) or id(value) in self._lasting:
            return False
        if value is sys.modules:
            return False  # what is imported stays
        if isinstance(owner, Names | type) or id(owner) in self._beyond:
            return True
        return id(owner) in self._lasting and not is_users(type(value).__module__)

    def _sets(self, owner: Any, key: Any) -> None:
        if isinstance(owner, Names | types.ModuleType):
            self._hold_name(owner.names if isinstance(owner, Names) else vars(owner), key)
        elif isinstance(owner, type):
            if id(owner) not in self._lasting or str(key).startswith("__"):
                self._hold_name(owner, key)
        elif key is ALL:
            self._changes(owner)
        elif id(owner) in self._beyond or id(owner) in self._lasting:
            attributes = attributes_of(owner)
            if isinstance(attributes, dict) and id(attributes) not in self._spaces:
                self._spaces.add(id(attributes))
                self._hold(AttributesHolder(attributes, owner))

    def _hold_name(self, owner: Any, key: Any) -> None:
        if isinstance(key, str) and (id(owner), key) not in self._names:
            self._names.add((id(owner), key))
            holder = MemberHolder(owner, key)
            holder.before = [(name, original_of(value)) for name, value in holder.before]
            self._hold(holder)

    def _changes(self, value: Any) -> None:
        """Hold a container or an array before its content is changed."""
        if id(value) in self._beyond and id(value) not in self._lasting:
            holder = container_of(value) or content_of(value)
            if holder is not None:
                self._hold(holder)

    def _hold(self, holder: Holder) -> None:
        self._holders.append(holder)
        self._lasting.add(id(holder.owner))
