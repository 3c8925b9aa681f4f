"""The plain values that a traced forward reads and sets, each with its place."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...crossing.tags import TAG, Tag
from ..calls import Call
from ..entries import SharedChange
from .evaluation.members import ALL, BY_ARGUMENT, BY_NAME, UNKNOWN, member_of
from .places import space_of, tensors_in
from .remedies import OF_GENERATOR

_MOST_MEMBERS = 256  # of a container; larger ones are compared by identity
_Place = tuple[int, Any]  # an object by its id, and a name or key in it
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum, range),
    *(torch.dtype, torch.device),
)


@dataclass
class SharedValue:
    """The value at one place, and the hops and lines that read or set it."""

    owner: Any
    key: Any
    first_write: str = ""
    first_read: str = ""
    set_on: set[int] = field(default_factory=set)
    written_on: set[int] = field(default_factory=set)  # where code writes, the same value too
    set_again_on: set[int] = field(default_factory=set)  # in the backward, by a checkpoint
    read_on: set[int] = field(default_factory=set)
    counted_on: set[int] = field(default_factory=set)
    begun_on: dict[int, str] = field(default_factory=dict)  # where it begins anew, with the lines
    beside_on: set[int] = field(default_factory=set)  # where code beside the forward changes it
    updated_on: dict[int, str] = field(default_factory=dict)  # by what was there; with the lines
    lost_on: set[int] = field(default_factory=set)  # what others set there, an update may lose
    first_loss: str = ""
    ordered_on: set[int] = field(default_factory=set)  # where the order of its updates counts
    is_carried: bool = False  # what one forward leaves there the next one reads
    is_traced: bool = False  # whether the user's own code sets it
    follows: bool = False  # what it is set to follows from something, though it was the same
    is_constant: bool = True  # all values that it is set to may be equal in each forward
    remedy: str = ""  # where it is a special one
    held_by: tuple[Any, Any] | None = None  # where else to find it: an owner, and a key in that
    is_read_outside: bool = False  # by code that the model does not reach, such as a hook's
    is_unnamed: bool = False  # whether code reads it that does not have its name
    came_on: set[int] = field(default_factory=set)  # hops that read what a forward before has left
    made_on: set[int] = field(default_factory=set)  # the stages that make the tensors in it
    stored_on: set[int] = field(default_factory=set)  # where it is only put elsewhere
    said_on: set[int] = field(default_factory=set)  # where it is only printed or logged
    is_bare: bool = False  # whether it is set to a value without tensors
    is_fixed: bool = True  # whether its setters say what they set it to: ``module.eval()``
    lines: set[str] = field(default_factory=set)  # that set it, to the same value too
    set_in: list[tuple[Call | None, str]] = field(default_factory=list)  # calls, with the lines
    read_in: dict[int, tuple[Call | None, str]] = field(default_factory=dict)  # by the call's id

    @property
    def place(self) -> tuple[int, Any]:
        """Where it is: an object's id, with a name or key; ``None``: its content."""
        return space_of(self.owner), None if self.key in (ALL, BY_ARGUMENT) else self.key

    def is_set(self, hop: int, line: str, calls: Iterable[Call | None] = ()) -> None:
        """Note that code on a hop sets it, in one of the forward's calls."""
        self.set_in += [(call, line) for call in calls]
        self.first_write = self.first_write or line
        self.lines.add(line)
        self.set_on.add(hop)

    @property
    def is_drawn(self) -> bool:
        """Whether it is a random generator."""
        return self.remedy == OF_GENERATOR

    @property
    def is_changed(self) -> bool:
        """Whether forwards set it, or count in it."""
        return bool(self.set_on or self.counted_on)

    def is_found(self, hop: int, line: str) -> None:
        """Note that code on a hop may find what the forward before has left."""
        # A branch that was not taken is noted when its function is over, so after later hops.
        is_before = not self.set_on or hop < min(self.set_on)
        self.came_on |= {hop} if is_before else set()
        # ``VARIABLE.set(VARIABLE.get() + 1)`` finds the variable first, and sets it last.
        self.is_carried = self.is_carried or is_before or self.first_write == line

    def is_read(
        self, hop: int, line: str, calls: Iterable[Call | None] = (), *, stores: bool = False
    ) -> None:
        """Note that code on a hop reads it, in one of the forward's calls, or puts it elsewhere as
        it is."""
        self.stored_on |= {hop} if stores else set()
        for call in calls:
            self.read_in.setdefault(id(call), (call, line))
        self.first_read = self.first_read or line
        self.read_on.add(hop)

    def joined(self, other: SharedValue) -> SharedValue:
        """Return what is known of a value with what another one tells of the same place."""
        return replace(
            self,
            first_write=self.first_write or other.first_write,
            first_read=self.first_read or other.first_read,
            first_loss=self.first_loss or other.first_loss,
            set_on=self.set_on | other.set_on,
            written_on=self.written_on | other.written_on,
            read_on=self.read_on | other.read_on,
            counted_on=self.counted_on | other.counted_on,
            begun_on=other.begun_on | self.begun_on,
            beside_on=self.beside_on | other.beside_on,
            updated_on=other.updated_on | self.updated_on,
            lost_on=self.lost_on | other.lost_on,
            ordered_on=self.ordered_on | other.ordered_on,
            is_carried=self.is_carried or other.is_carried,
            is_constant=self.is_constant and other.is_constant,
            remedy=self.remedy or other.remedy,
            is_read_outside=self.is_read_outside or other.is_read_outside,
            is_unnamed=self.is_unnamed or other.is_unnamed,
            is_bare=self.is_bare or other.is_bare,
            made_on=self.made_on | other.made_on,
            stored_on=self.stored_on | other.stored_on,
            set_again_on=self.set_again_on | other.set_again_on,
            came_on=self.came_on | other.came_on,
            lines=self.lines | other.lines,
            read_in={**other.read_in, **self.read_in},
        )

    def comes_late(self, others: Iterable[SharedValue]) -> bool:
        """Return whether a later hop sets what an earlier one of the next forward reads, which may
        have begun before.

        Args:
            others: the values that overlap with this one.
        """
        came_on = self.came_on.union(*(other.came_on for other in others))
        return bool(came_on) and min(came_on) < max(self.set_on, default=-1)

    def is_changed_beside(self, hop: int, line: str, *, updates: bool) -> None:
        """Note that code beside the forward sets it, or updates what is there."""
        self.beside_on.add(hop)
        if updates:
            self.updated_on.setdefault(hop, line)

    def tells_itself(self, read_on: Iterable[int], stage_of: Callable[[int], int]) -> bool:
        """Return whether each value that is set there says which micro-batch it is of, wherever it
        is read. A tensor says it to an operation, but not to the stage that made it, which reads a
        state of its own there, nor to code that only puts it elsewhere.

        Args:
            read_on: the hops that read it.
            stage_of: returns the stage of a hop.
        """
        apart = (hop for hop in read_on if self.set_on - {hop})
        if self.is_bare or any(self.set_on - {hop} for hop in self.stored_on):
            return False
        return self.made_on.isdisjoint(map(stage_of, apart))

    def is_counted(self, hop: int, line: str, how: Mapping[str, bool]) -> None:
        """Note that code on a hop reads it only to update it, as :func:`read_how` says."""
        self.counted_on.add(hop)
        self.ordered_on |= {hop} if how.get("ordered") else set()
        if how.get("loses"):
            self.lost_on.add(hop)
            self.is_constant = False
            self.first_loss = self.first_loss or line


class AskedPlaces:
    """The places that the conditions of a forward ask.

    Args:
        values: what the forward reads and sets, by place.

    Attributes:
        turned: those that a forward has set after a condition had asked.
    """

    def __init__(self, values: Mapping[_Place, SharedValue]) -> None:
        self.turned, self._asked, self._values = set[_Place](), set[_Place](), values

    def is_open(self, where: _Place) -> bool:
        """Return whether a forward may have set what a condition asks."""
        if where in self.turned or self._is_set(where):
            return True
        self._asked.add(where)
        return False

    def turn_later(self) -> bool:
        """Return, when the forward is over, whether it has set anything after a condition had asked
        for it: then another run shows what that one leads to."""
        later = {where: self._values[where] for where in self._asked if where in self._values}
        # What was set to another value may have been made once, and the second run finds it.
        found = {where for where, value in later.items() if value.counted_on or value.follows}
        is_new = not found <= self.turned
        self.turned |= found
        return is_new

    def _is_set(self, where: _Place) -> bool:
        value = self._values.get(where)
        return value is not None and (value.is_changed or value.follows)


def read_inside(values: Mapping[_Place, SharedValue]) -> Iterator[tuple[_Place, SharedValue]]:
    """Yield the containers that the forward changes and that code may read by a name, each with its
    place and with those reads: ``list(self.layers.values())[1].counts[0]``.

    Args:
        values: all values, by their places.
    """
    for read in [value for value in values.values() if value.owner is BY_NAME]:
        named = (v for v in values.values() if v.key == read.key and v.owner is not BY_NAME)
        held = {id(member_of(value.owner, value.key)) for value in named}
        for where, value in values.items():
            if id(value.owner) in held and value.set_on and isinstance(value.owner, _CONTAINERS):
                yield where, value.joined(read)


def note_kept(values: Iterable[SharedValue], held: Iterable[tuple[Any, int]]) -> None:
    """Note where a tensor that one hop leaves at a place is kept by another one that reads the
    place, by whatever way it came there: in a list of its own, or in a hook.

    Args:
        values: all values that are known.
        held: what code holds that autograd calls, and the hop in whose backward that is.
    """
    known = [(v, {*_made_in(member_of(v.owner, v.key))}) for v in values if v.set_on]
    keepers = [(v, {*_made_in(v.owner)} if v.key is ALL else made, v.set_on) for v, made in known]
    hooks = [(None, {*_made_in(one)}, {hop}) for one, hop in held]
    for value, made in known:
        for keeper, found, hops in (*keepers, *hooks):
            if keeper is not value and not made.isdisjoint(found):
                value.stored_on |= hops & value.read_on


def _made_in(value: Any) -> Iterator[int]:
    """Yield the ids of the tensors of one micro-batch that a value carries."""
    for tensor in tensors_in(value):
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and not tag.is_constant(tensor):
            yield id(tensor)


@contextmanager
def read_meanwhile(values: Mapping[_Place, SharedValue]) -> Iterator[list[SharedValue]]:
    """Yield a list that gets, at the end of a block, the values that code which does not run was
    seen to read in it."""
    before = [value for value in values.values() if value.is_read_outside]
    for value in before:
        value.is_read_outside = False
    found: list[SharedValue] = []
    yield found
    found += [value for value in values.values() if value.is_read_outside]
    for value in before:
        value.is_read_outside = True


@dataclass
class ApartRun:
    """What code that runs apart from the forward does in its order: a hook, or a function that
    ``torch.utils.checkpoint`` runs again. What it has set itself nothing else carries to it.

    Attributes:
        code: of the function that is looked at. Where that does not run, a function that it calls
            may read something before it sets that: ``self.n = self.next()``.
    """

    came: set[Hashable] = field(default_factory=set)
    fresh: dict[Hashable, object] = field(default_factory=dict)
    code: object = None

    def reads_its_own(self, where: Hashable) -> bool:
        """Note a read, and return whether it is of what was set here."""
        is_own = where in self.fresh and self.fresh[where] is self.code
        self.came |= set() if is_own else {where}
        return is_own

    def sets(self, where: Hashable) -> None:
        """Note that something is set."""
        if where not in self.came:
            self.fresh.setdefault(where, self.code)


def shared_change(
    known: SharedValue, name: str, read_on: set[int], where: str, remedy: str
) -> SharedChange:
    """Return the entry of a recording for a value that one hop sets and another one reads. Of one
    that begins anew this tells, and not what code beside the forward sets it to.

    Args:
        known: the value.
        name: its name.
        read_on: the hops that read it.
        where: the line that reads it first.
        remedy: the remedy for an error.
    """
    set_on, line = known.set_on, known.first_write
    if known.begun_on:
        set_on, line = {*known.begun_on}, next(iter(known.begun_on.values()))
    return SharedChange(
        f"{name}{in_backward(set_on)} on hops {hops_of(set_on)} ({line})",
        f"reads it{in_backward(read_on)}",
        hops_of(read_on),
        where,
        remedy,
        settles=known.is_constant,
        place=known.place,
    )


def back(hop: int) -> int:
    """Return the number that a hop's backward has, where hops have theirs."""
    return -1 - hop


def hops_of(numbers: Iterable[int]) -> list[int]:
    """Return the hops of such numbers, and of hops."""
    return sorted({hop if hop >= 0 else back(hop) for hop in numbers})


def in_backward(numbers: Iterable[int]) -> str:
    """Return in words whether any of them is a backward's."""
    return " in a backward" if min(numbers) < 0 else ""


class _Identity:
    """An object that is the same only as itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any) -> Any:
    """Return a snapshot of a value, to be compared later."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if _is_in_order(value) and len(value) <= _MOST_MEMBERS:
        return type(value), [*map(frozen, value)]
    if type(value) is slice:
        return slice, [frozen(value.start), frozen(value.stop), frozen(value.step)]
    if type(value) is frozenset and all(isinstance(member, _PLAIN) for member in value):
        return frozenset, value
    if type(value) is dict and len(value) <= _MOST_MEMBERS:
        return dict, [(frozen(key), frozen(member)) for key, member in value.items()]
    return value if value is UNKNOWN else _Identity(value)


def _is_in_order(value: Any) -> bool:
    """Return whether a value is a list or a tuple, torch's size or one with names for its members
    too."""
    is_named = isinstance(value, tuple) and hasattr(type(value), "_fields")
    return type(value) in (list, tuple, torch.Size) or is_named
