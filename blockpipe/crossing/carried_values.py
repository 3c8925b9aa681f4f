"""Plain values that one forward leaves for the next one, and that a recomputation must leave alone.

What a module saves for its backward is compared when it is made again; that shows most modules that
depend on something else. A count does not show there if only the result depends on it, or the code
around the module: the module counts once more when it is run again, and later micro-batches go on
from there. To compare results would not do, for a recomputation ends where the last tensor has been
saved, and a value that is set from outside may be another one by then without harm.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.tensors import version_of
from ..errors import StateError
from ..restoring.holders import Holder
from ..restoring.iterators import is_iterator
from ..restoring.model_state import ModelState

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_MEMBERS = 256  # of a container; larger ones count as the same


@dataclass(frozen=True)
class Carried:
    """One such value.

    Attributes:
        name: its name, for messages.
        where: the line that reads it.
        stage: the stage whose forwards set it.
        owner: the id of the object, namespace or variable that it is in.
        key: the name or key in that; ``None``: its content.
    """

    name: str
    where: str
    stage: int
    owner: int
    key: Any


class CarriedValues:
    """The values that a model's recomputed modules may change.

    Args:
        model: the user's.
        carried: the values; those of one stage are only changed by its own lane.
    """

    def __init__(self, model: nn.Module, carried: Iterable[Carried]) -> None:
        self._holders: dict[int, Holder] = {}
        for holder in ModelState(model, values=False).holders:
            holder.forget()
            for owner in _owners_of(holder):
                self._holders.setdefault(id(owner), holder)
        self._carried = [one for one in carried if one.owner in self._holders]

    @contextmanager
    def left_alone(self, stage: int, what: str, m: int) -> Iterator[None]:
        """Check at the end of a recomputation that it has left the values of its stage alone.

        Args:
            stage: the stage.
            what: what is run again.
            m: the micro-batch.

        Raises:
            StateError: one of them has changed.
        """
        before = [(one, self._value(one)) for one in self._carried if one.stage == stage]
        yield
        for one, then in before:
            if self._value(one) != then:
                raise StateError(
                    f"{what} on stage {stage} sets {one.name}, which the next forward reads "
                    f"({one.where}), and set it once more when it was recomputed for micro-batch "
                    f"{m}: later micro-batches would go on from there; ask "
                    "blockpipe.is_recomputing() before it is set, set it outside of the module, or "
                    "mark it with checkpoint=False"
                )

    def _value(self, one: Carried) -> Any:
        members = self._holders[one.owner].now()
        if one.key is None:
            return [_seen(member) for _, member in members[:_MOST_MEMBERS]], len(members)
        for key, value in members:
            if key == one.key or getattr(key, "__name__", None) == one.key:
                return _seen(value)
        return None


Part = tuple[object, int]  # by what it is, and how often it was written to


@contextmanager
def tensors_left_alone(
    held: Sequence[tuple[str, Callable[[], Iterable[Part]]]], stage: int, what: str, m: int
) -> Iterator[None]:
    """Check at the end of a recomputation that it has not written to tensors once more, nor made a
    module of other parts.

    Args:
        held: returns the parts, by name.
        stage: the stage.
        what: what is run again.
        m: the micro-batch.

    Raises:
        StateError: it has.
    """
    before = [[*look()] for _, look in held]
    yield
    for (name, look), then in zip(held, before, strict=True):
        now = [*look()]
        is_same = len(now) == len(then)
        pairs = zip(now, then, strict=False)
        if not is_same or any(a[0] is not b[0] or a[1] != b[1] for a, b in pairs):
            raise StateError(
                f"{what} on stage {stage} writes to {name}, and did so once more when it was "
                f"recomputed for micro-batch {m}; ask blockpipe.is_recomputing() before, write it "
                "outside of the module, or mark it with checkpoint=False"
            )


def written(tensor: Tensor | None) -> Part:
    """Return a tensor as such a part."""
    return tensor, -1 if tensor is None else version_of(tensor)


def _owners_of(holder: Holder) -> Iterable[object]:
    """Return the objects by which the recording knows what a holder holds."""
    yield holder.owner
    if (space := holder.namespace()) is not None:
        yield space
    if isinstance(holder.owner, types.FunctionType):
        yield from holder.owner.__closure__ or ()


def is_among(places: Container[tuple[int, Any]], holder: Holder, key: Any) -> bool:
    """Return whether a member of an object, or its content, is at one of some places.

    Args:
        places: the ids of objects with names or keys; of a content ``None``.
        holder: of the object; of a function, its variables.
        key: the name or key; of a slot, its descriptor.
    """
    names = name_of(key), None
    return any((id(owner), name) in places for owner in _owners_of(holder) for name in names)


def name_of(key: Hashable) -> Any:
    """Return a name or key; a slot is given as its descriptor."""
    return key.__name__ if isinstance(key, types.MemberDescriptorType) else key


def _seen(value: Any) -> Any:
    """Return a snapshot of a value, to be compared later."""
    if isinstance(value, _PLAIN):
        return value
    if is_iterator(value):
        try:
            return repr(value.__reduce__())
        except Exception:  # it cannot be copied
            return id(value)
    if type(value) in (list, tuple, deque, set, torch.Size) and len(value) <= _MOST_MEMBERS:
        return [*map(_seen, value)]
    if type(value) is dict and len(value) <= _MOST_MEMBERS:
        return [(_seen(key), _seen(member)) for key, member in value.items()]
    return id(value)
