"""Attributes that a recorded forward reads, and classes that tell when one is set.

A proxy for the objects was no alternative: the user's code compares them by identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..._common.threads.process_changes import ProcessChange
from ...recording.entries import SetAttribute
from ...stages.cursor import current_cursor

_NAME = "__setattr__"
_UNSET: Any = object()


class KnownAttributes:
    """The attributes that a recorded forward reads.

    Args:
        attributes: these, with the stages that use them.
    """

    def __init__(self, attributes: Iterable[SetAttribute]) -> None:
        self._places = dict[tuple[int, str], SetAttribute]()
        kinds = dict[type, None]()
        for one in attributes:
            owner = None if one.owner is None else one.owner()
            if owner is not None:
                self._places[id(owner), one.key] = one
                kinds[nn.Module if isinstance(owner, nn.Module) else type(owner)] = None
        self.classes = [_told_sets(kind) for kind in kinds]
        """The changes of their objects' classes, to be entered while a step runs."""

    def of(self, owner: object, key: str) -> SetAttribute | None:
        """Return an object's attribute, if the forward reads it."""
        found = self._places.get((id(owner), key))
        is_it = found is not None and found.owner is not None and found.owner() is owner
        return found if is_it else None


class _ToldSets(ProcessChange):
    """A class whose objects tell of each attribute that is set.

    Args:
        kind: the class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = weakref.ref(kind)
        self._own: Any = _UNSET

    def put_on(self) -> None:
        """Put a function in the place of the class's ``__setattr__``."""
        kind = self._kind()
        if kind is None:
            return
        self._own = vars(kind).get(_NAME, _UNSET)
        original: Callable[[Any, str, Any], None] = getattr(kind, _NAME)

        def set_attribute(owner: Any, name: str, value: Any) -> None:
            cursor = current_cursor()
            on_set = None if cursor is None else cursor.on_set
            after = on_set(cursor.stage, owner, name) if cursor and on_set else None
            original(owner, name, value)
            if after is not None:
                after()

        setattr(kind, _NAME, set_attribute)

    def take_off(self) -> None:
        """Put the original back."""
        kind = self._kind()
        if kind is None:
            return
        if self._own is not _UNSET:
            setattr(kind, _NAME, self._own)
        elif _NAME in vars(kind):
            delattr(kind, _NAME)


_changes = weakref.WeakKeyDictionary[type, _ToldSets]()


def _told_sets(kind: type) -> _ToldSets:
    return _changes.setdefault(kind, _ToldSets(kind))
