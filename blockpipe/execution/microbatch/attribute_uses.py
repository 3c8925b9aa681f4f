"""Attributes that a step sets, or reads, on another stage than the recorded forward.

What a step has changed is compared after it with what was there before. If the recorded forward
changes a value anyway, as a running mean of its own stage, that does not show that another stage
has set it, too, or reads it: in code that the data choose, a count, or a key that nobody can tell.
So while a step runs, classes tell of the attributes of their objects, and the cursor says on which
stage they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torch import nn

from ..._common.callsite import users_line
from ...errors import StateError
from ...preparation.watched.told_attributes import KnownAttributes, own_value, part_of
from ...recording.entries import UsedAttribute
from ...recording.plain_values.places import has_tensors
from ...stages.cursor import current_stage

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class AttributeUses:
    """Watches them in one step, whose micro-batches are under way at once.

    Args:
        known: the attributes that the recorded forward uses.
    """

    def __init__(self, known: KnownAttributes) -> None:
        self._known = known

    def sets(self, owner: object, key: str) -> Callable[[], None] | None:
        """Look before a stage sets an attribute; returns what looks afterwards.

        Raises:
            StateError: another stage uses it. What looks afterwards raises this.
        """
        place, stage = self._known.of(owner, key), current_stage()
        if place is None or stage is None or stage in place.set_on or not place.read_on:
            return None
        if place.used_on <= {stage}:
            return None
        then = own_value(owner, key)

        def is_set() -> None:
            now = own_value(owner, key)
            # A tensor says itself of which micro-batch it is, but not a parameter or a buffer.
            is_part = (
                isinstance(owner, nn.Module) and now is not then and now is part_of(owner, key)
            )
            if not _is_same(then, now) and (is_part or not has_tensors((then, now))):
                _refuse("set", key, place, stage)

        return is_set

    def reads(self, owner: object, key: str) -> None:
        """Look where a stage reads an attribute.

        Raises:
            StateError: another stage sets it.
        """
        place, stage = self._known.of(owner, key), current_stage()
        if place is None or stage is None or not place.set_on:
            return
        if stage in place.used_on | place.said_on:
            return
        if not has_tensors(own_value(owner, key)):
            _refuse("read", key, place, stage)


class LateUses:
    """Watches them in the backwards of such a step: code that autograd calls, and of which the
    recording did not know that it uses an attribute of the forwards. Later forwards come before.

    Args:
        known: the attributes that the recorded forward uses.
        rerun: the stages with functions of which it is known that backwards run them again, and
            what these use.
    """

    def __init__(self, known: KnownAttributes, rerun: Collection[int]) -> None:
        self._known, self._rerun = known, rerun

    def _of(self, owner: object, key: str) -> tuple[UsedAttribute | None, int | None]:
        stage = current_stage()
        is_known = stage is None or stage in self._rerun
        return None if is_known else self._known.of(owner, key), stage

    def sets(self, owner: object, key: str) -> Callable[[], None] | None:
        """Look before a backward sets an attribute; returns what looks afterwards.

        Raises:
            StateError: forwards read it. What looks afterwards raises this.
        """
        place, stage = self._of(owner, key)
        if place is None or stage is None or stage in place.set_late or not place.read_early:
            return None
        then = own_value(owner, key)

        def is_set() -> None:
            if not _is_same(then, own_value(owner, key)):
                _refuse_late("set", key, place, stage, place.read_early)

        return is_set

    def reads(self, owner: object, key: str) -> None:
        """Look where a backward reads an attribute.

        Raises:
            StateError: forwards set it.
        """
        place, stage = self._of(owner, key)
        if place is None or stage is None or not place.set_early:
            return
        if stage not in place.read_late | place.set_late | place.said_on:  # or it reads its own
            _refuse_late("read", key, place, stage, place.set_early)


def _refuse_late(
    how: str, key: str, place: UsedAttribute, stage: int, others: set[int]
) -> NoReturn:
    raise StateError(
        f"{_named(place, key)} was {how} in a backward on stage {stage} ({users_line()}), where "
        "the recorded forward handed no such code to autograd, and forwards on stages "
        f"{sorted(others)} {'read' if how == 'set' else 'set'} it{_where(place)}: those "
        "of later micro-batches come before this backward; keep what it needs for it in the "
        "forward (a variable, or its context), set it between steps, or use schedule='sequential'"
    )


def _refuse(how: str, key: str, place: UsedAttribute, stage: int) -> NoReturn:
    others = sorted((place.used_on if how == "set" else place.set_on) - {stage})
    raise StateError(
        f"{_named(place, key)} was {how} during the step, which it was not when the model was "
        f"recorded, on stage {stage} ({users_line()}), and stages {others} "
        f"{'use' if how == 'set' else 'set'} it{_where(place)}: "
        "micro-batches under way at once would change it for each other; pass it along as an "
        "argument, set it between steps, or use schedule='sequential'"
    )


def _named(place: UsedAttribute, key: str) -> str:
    return place.name if place.key is not None else f"attribute {key!r} of {place.name}"


def _where(place: UsedAttribute) -> str:
    return f" ({place.where})" if place.where else ""


def _is_same(then: Any, now: Any) -> bool:
    is_plain = type(then) is type(now) and isinstance(now, _PLAIN)
    return then is now or (is_plain and bool(then == now))
