"""Tell which objects outlive a forward: those that were there before, and what is kept in them."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from torch import nn

from ....restoring.holders import Holder
from ....restoring.iterators import advances
from ..evaluation.members import Names, whose
from ..evaluation.still_frames import Context
from ..known_values import KnownValues
from ..places import is_content, is_used_whole, names_of, owners_by_space
from ..syntax.accesses import Access
from ..taken_in import TakenIn
from ..values import frozen


class Lasting:
    """The objects that outlive a forward.

    Args:
        holders: the holders of all objects that can be reached from the model, and from modes.
        put_back: the first of them; those of objects beyond that the forward changes are added.
        modules: the model's modules, by path.

    Attributes:
        first: the ids of those that were there before the forward.
        names: the names of modules, parameters and buffers, by id.
        ids: the ids of those that are known by now.
        taken_in: takes others among them.
        has_all: whether all count that code uses: it runs beside the forward.
    """

    def __init__(
        self, holders: Iterable[Holder], put_back: list[Holder], modules: dict[str, nn.Module]
    ) -> None:
        self.ids = {id(holder.owner) for holder in holders} | {*map(id, modules.values())}
        self.first = frozenset(self.ids)
        self._by_space = owners_by_space(holders, modules.values())
        self._by_space[id(os.environ)] = variables = os.environ._data  # type: ignore[attr-defined]
        self.names = names_of(modules)
        self.ids.update(self.names, [id(variables)])
        self.taken_in = TakenIn(put_back, self.ids)
        self.has_all = False
        self._kept = list[Any]()  # so that no other object gets an id

    def has(self, owner: Any) -> bool:
        """Return whether an object outlives the forward."""
        is_variable = isinstance(owner, Names | types.CellType | threading.local | type)
        return is_variable or id(owner) in self.ids or self.taken_in.may_take(owner)

    def add(self, *found: Any) -> None:
        """Note that some objects do."""
        self._kept += found
        self.ids.update(map(id, found))

    def add_beside(self, owner: Any, value: Any, *, is_there: bool) -> None:
        """Note what does for code beside the forward, or is left by it there.

        Args:
            owner: an object that it uses.
            value: what it finds there.
            is_there: whether it is a module's.
        """
        is_left = is_content(value) and owner is not None and self.has(owner)
        if (self.has_all and not isinstance(owner, Context)) or is_there or is_left:
            self.add(owner, value)

    def whose(self, value: Any) -> Any:
        """Return the object whose attributes a value is, or the value."""
        return whose(value, self._by_space, self.ids)

    def is_content(
        self, value: Any, access: Access, owner: Any, known: KnownValues, *, is_still: bool
    ) -> bool:
        """Return whether a value can change, and outlives the forward.

        Args:
            value: the value.
            access: the access of it.
            owner: the object that it is in; ``None`` if it is not known.
            known: is told of context variables.
            is_still: whether the code does not run.
        """
        if isinstance(value, ContextVar):
            known.variables.setdefault(id(value), (value, frozen(value.get(None))))
            return True
        if advances(value):
            return owner is not None and self.has(owner)
        is_known = id(value) in self.ids
        may_change = (is_known or self.taken_in.may_take(value)) and is_content(value)
        is_space = id(value) in self._by_space
        if is_space or may_change or whose(value, {}, ()) is not value:
            return True
        return is_known and is_used_whole(value, access, is_still=is_still)
