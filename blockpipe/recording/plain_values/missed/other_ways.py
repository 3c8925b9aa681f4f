"""What stages share if forwards go other ways than the recorded one: with other sizes, or where two
recorded ones have gone apart, and micro-batches of one step go both ways.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from ...._common.coverage.covered_code import Coverage
from ...entries import GeneratorUse, SharedChange, TensorInfo
from ...library_reads import LibraryReads
from ...reads import NamesRead
from ...recording import Recording
from ..evaluation.members import ALL, Names, member_of
from ..known_values import KnownValues
from ..places import has_tensors, space_of
from ..values import SharedValue


def note_by_size(
    known: KnownValues, reads: NamesRead, result: Recording, held: Mapping[int, TensorInfo]
) -> None:
    """Write down whether one hop sets a value and another one reads it if micro-batches of other
    sizes come. Tensors are left out: they are checked when they are read.

    Args:
        known: the values of a forward.
        reads: what the user's code reads.
        result: with its hops and calls.
        held: the parameters and buffers by id, with the hops that read them.
    """
    if len(result.hops) < 2 or not known.of_other_sizes:
        return
    both = known.joined(known.of_other_sizes)
    known.libraries.note(both.values.values(), result.calls)
    both.needed_on(held)
    for where in known.of_other_sizes:
        value = both.values[where]
        for one in (value, *both.of_all(value)):
            held_there = one.owner if one.key is ALL else member_of(one.owner, one.key)
            if id(one.owner) in known.ignored or has_tensors(held_there):
                continue
            change = both.change_of(one, reads, result)
            if change is not None:
                if known.turns(one.owner, one.key) and _is_same(one, both):
                    result.settles = True
                else:
                    result.turns_by_size = result.turns_by_size or change.where


def _is_same(value: SharedValue, known: KnownValues) -> bool:
    """Whether the one line that sets a value sets the same for each micro-batch of a size."""
    is_apart = value.key is not ALL and not known.of_all(value)
    return is_apart and value.is_constant and len(value.lines) == 1


@dataclass
class Way:
    """Where a recorded forward has gone, and what it has read and set there that outlives it.

    Attributes:
        coverage: the instructions of the user's code that it has run.
        known: the values.
        reads: what the user's code reads; ``None``: it has let go of that.
        generators: the uses of each generator of the user's, by its number.
        may_leave: whether any code of the user's in reach may change anything for others.
        others: recordings of micro-batches of the same kind that have gone another way.
    """

    coverage: Coverage
    known: KnownValues
    reads: NamesRead | None
    generators: Mapping[int, GeneratorUse]
    may_leave: bool
    others: list[Recording] = field(default_factory=list)

    def add(self, other: Way) -> None:
        """Take in what another run of the same forward has."""
        self.coverage.add(other.coverage)
        self.known = self.known.joined(other.known.values)

    def let_go(self) -> None:
        """Keep no object of the user's: another way has its own, of which this one has the ids."""
        if self.reads is None:
            return
        known, self.known = self.known, KnownValues({}, LibraryReads((), {}), fake=self.known.fake)
        self.known.values = {
            where: replace(value, owner=type(value.owner), held_by=None)
            for where, value in known.values.items()
            if not isinstance(value.key, Tensor | nn.Module)
        }
        self.reads = None

    def hops_using(self, space: int) -> set[int]:
        """Return the hops that use anything in an object, by its id; below zero for backwards."""
        values = (value for (where, _), value in self.known.values.items() if where == space)
        return set[int]().union(
            *(v.set_on | v.read_on | v.counted_on | v.written_on | v.beside_on for v in values)
        )

    def set_for_later(
        self, others: Iterable[Way], compared: Container[tuple[int, object]]
    ) -> Iterator[str]:
        """Yield the lines that set what a later forward finds and reads, by this way or another.

        Args:
            others: the other ways.
            compared: the places that steps compare: ids of objects, with keys.
        """
        others = [*others]
        for (space, key), value in self.known.values.items():
            elsewhere = [way.known.values.get((space, key)) for way in others]
            found = [v for v in (value, *elsewhere) if v is not None and v.read_on]
            is_found = any(v.is_carried or v.is_drawn for v in found)
            place = space, None if key is ALL else key
            if value.is_changed and is_found and place not in compared:
                yield value.first_write

    def shared_with(self, other: Way, result: Recording) -> Iterator[SharedChange]:
        """Yield the values that one of two forwards sets and the other one reads, on another hop.

        Args:
            other: of the other forward, which has its objects still.
            result: its recording.
        """
        mine = self.known if self.reads is not None else self._with_objects_of(other.known)
        both, alone = other.known.joined(mine.values), (mine, other.known)
        changed = {where[0] for one in alone for where, v in one.values.items() if v.is_changed}
        assert other.reads is not None
        for where, value in both.values.items():
            if where[0] not in changed or where[0] in other.known.ignored:
                continue
            if any(_is_shared_in(one, where, other.reads, result) for one in alone):
                continue  # which has been judged
            if (change := both.change_of(value, other.reads, result)) is not None:
                yield change

    def _with_objects_of(self, other: KnownValues) -> KnownValues:
        """Return the values of objects that another forward has as well."""
        owners = {space: value.owner for (space, _), value in other.values.items()}
        mine = {
            where: replace(value, owner=owners[where[0]])
            for where, value in self.known.values.items()
            if where[0] in owners and type(owners[where[0]]) is value.owner
        }
        return other.with_values(mine)


def _is_shared_in(
    known: KnownValues, where: tuple[int, object], reads: NamesRead, result: Recording
) -> bool:
    value = known.values.get(where)
    return value is not None and known.change_of(value, reads, result) is not None


def lasting_in(known: KnownValues, first: Container[int]) -> KnownValues:
    """Return those values that outlive a forward.

    Args:
        known: its values.
        first: the ids of the objects that were there before.
    """
    lasting = {
        where: value
        for where, value in known.values.items()
        if isinstance(value.owner, Names | type) or space_of(value.owner) in first
    }
    found = known.with_values(lasting)
    found.ignored = known.ignored
    return found
