"""Attributes that a step sets on another stage than the recorded forward.

What a step has changed is compared after it with what was there before. If the recorded forward
changes a value anyway, as a running mean of its own stage, that does not show that another stage
has set it, too: in code that the data choose, a count, or a key that nobody can tell. So while a
step runs, classes tell of each attribute that is set on their objects, and the cursor says by which
stage.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ...errors import StateError
from ...preparation.watched.told_sets import KnownAttributes
from ...recording.entries import SetAttribute

_UNSET: Any = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class AttributeSets:
    """Watches them in one step, whose micro-batches are under way at once.

    Args:
        known: the attributes.
    """

    def __init__(self, known: KnownAttributes) -> None:
        self._known = known
        self._found: StateError | None = None

    def sets(self, stage: int, owner: object, key: str) -> Callable[[], None] | None:
        """Look before a stage sets an attribute; returns what looks afterwards."""
        place = self._known.of(owner, key)
        if place is None or stage in place.set_on or place.used_on <= {stage}:
            return None
        then = _member(owner, key)

        def is_set() -> None:
            now = _member(owner, key)
            if not _is_same(then, now) and self._found is None and not any(tensors((then, now))):
                self._found = _error(place, stage)

        return is_set

    def conclude(self) -> None:
        """Raise an error if an attribute was set on a stage that another one uses.

        Raises:
            StateError: this.
        """
        found, self._found = self._found, None
        if found is not None:
            raise found


def _member(owner: object, key: str) -> Any:
    """Return an attribute of an object's own, without running code of the user's."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        own = {}
    if key in own:
        return own[key]
    slot = next((vars(kind)[key] for kind in type(owner).__mro__ if key in vars(kind)), None)
    try:
        return slot.__get__(owner) if isinstance(slot, types.MemberDescriptorType) else _UNSET
    except AttributeError:
        return _UNSET


def _is_same(then: Any, now: Any) -> bool:
    is_plain = type(then) is type(now) and isinstance(now, _PLAIN)
    return then is now or (is_plain and bool(then == now))


def _error(place: SetAttribute, stage: int) -> StateError:
    others, read = sorted(place.used_on - {stage}), f" ({place.where})" if place.where else ""
    return StateError(
        f"{place.name} was set during the step, which it was not when the model was recorded, on "
        f"stage {stage} ({users_line()}), and stages {others} use it{read}: micro-batches under "
        "way at once would change it for each other, and this step's gradients may not be the "
        "plain loop's; pass it along as an argument, set it between steps, or use "
        "schedule='sequential'"
    )
