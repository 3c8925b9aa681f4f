"""The plain values that a traced forward has read and set, and what follows from that."""

from __future__ import annotations

import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..._common.libraries import has_users_code
from ..calls import Call
from ..entries import CarriedValue, SharedChange, TensorInfo
from ..library_reads import LibraryReads
from ..reads import NamesRead
from ..recording import Recording
from .begun_anew import note_begun
from .evaluation.members import ALL, BY_ARGUMENT, BY_NAME, NEEDS_GRADIENT, Names, member_of
from .places import CODE, attribute_of, has_tensors, is_content, named, space_of
from .remedies import (
    OF_FORWARD,
    OF_LOSS,
    OF_ORDER,
    OF_OTHERS_TENSOR,
    OF_TENSOR,
    OF_UPDATE,
    OF_VARIABLE,
    remedy_for,
)
from .values import (
    AskedPlaces,
    SharedValue,
    back,
    frozen,
    hops_of,
    read_inside,
    read_meanwhile,
    shared_change,
)

_HOLD_ANY = (nn.ParameterDict, nn.ParameterList)  # plain values, too, as attributes

_Where = tuple[int, Any]  # an object by its id, and a name or key in it


class KnownValues:
    """The values at all places that one forward has read or set.

    Args:
        paths: of the modules.
        libraries: what libraries' modules read.
        fake: whether the forward runs on fake tensors; then nothing depends on the data.

    Attributes:
        variables: the context variables among them by id, each with its first value.
        set_in_new: the names of what the forward has set in objects that it has made itself.
        paths: the path of each module, by its id.
        values: the values by place.
        of_other_sizes: those that only a micro-batch of another size leads to.
        ignored: the containers of which nothing is told, by id.
    """

    def __init__(self, paths: Mapping[int, str], libraries: LibraryReads, *, fake: bool) -> None:
        self.variables: dict[int, tuple[ContextVar[Any], Any]] = {}
        self._set_by_run = set[int]()  # of these, those that code has set which ran
        self.is_run = True  # whether notes are of such code, and not of what others might do
        self.paths, self.libraries, self.fake = paths, libraries, fake
        self.values: dict[_Where, SharedValue] = {}
        self.of_other_sizes: dict[_Where, SharedValue] = {}
        self.is_of_other_sizes = False  # whether notes are what other sizes lead to
        self.ignored, self.set_in_new = dict[int, Any](), set[str]()  # the former by id
        self._forwards: dict[int, SharedValue] = {}  # by the id of their code
        self.asked = AskedPlaces(self.values)  # by conditions
        self._of_loss: list[SharedValue] = []
        self._is_unsure = False  # whether code beside the forward may read one of these

    def ignore(self, owners: Iterable[Any]) -> None:
        """Tell nothing of some containers: the tables of modes, which collect what these see."""
        self.ignored.update((id(owner), owner) for owner in owners)

    def at(self, owner: Any, key: Any) -> SharedValue:
        """Return the value at a place, which is known from here on."""
        where, values = (space_of(owner), key), self.values
        if self.is_of_other_sizes:
            values = self.of_other_sizes
        if where not in values:
            values[where] = new = SharedValue(owner, key)
            if (read := values.get((space_of(BY_NAME), key))) is not None:
                values[where] = new.joined(read)
        return values[where]

    @contextmanager
    def for_other_sizes(self) -> Iterator[None]:
        """Note, while entered, what only a micro-batch of another size leads to."""
        before, self.is_of_other_sizes = self.is_of_other_sizes, True
        try:
            yield
        finally:
            self.is_of_other_sizes = before

    @contextmanager
    def beside_loss(self) -> Iterator[None]:
        """Note, while entered, what the loss reads."""
        with read_meanwhile(self.values) as self._of_loss:
            yield

    def read_by_loss(self) -> dict[str, int | None]:
        """Return what the forward sets and the loss reads, in words, with the ids of its owners."""
        values = (v for v in self._of_loss if any(k.set_on for k in (v, *self.of_all(v))))
        return {f"{self._named(v)} ({v.first_read})": space_of(v.owner) for v in values}

    def turns(self, owner: Any, key: Any) -> bool:
        """Return whether the value at a place may be set to another one for another size."""
        known = self.of_other_sizes.get((space_of(owner), key))
        return known is not None and bool(known.set_on)

    def may_set(self, owner: Any, key: Any) -> bool:
        """Return whether the forward sets the value at a place, for any size."""
        known = self.found_at(owner, key)
        return (known is not None and known.is_changed) or self.turns(owner, key)

    def found_at(self, owner: Any, key: Any) -> SharedValue | None:
        """Return the value at a place, if it is known."""
        return self.values.get((space_of(owner), key))

    def owners_by_name(self, name: str | None) -> list[Any]:
        """Return the objects that a read of a name may be about: all that are known to have it, and
        ``BY_NAME`` for those that come to be known later."""
        if name is None:
            return []
        is_new = name in self.set_in_new and not self.is_of_other_sizes
        self._is_unsure = self._is_unsure or is_new
        known = (v.owner for v in self.values.values() if v.key == name)
        return [BY_NAME, *(owner for owner in known if owner is not BY_NAME)]

    def is_set_by_name(self, name: str | None, hop: int, line: str) -> None:
        """Note that code sets something of a name in an object that nobody can tell."""
        for owner in self.owners_by_name(name):
            known = self.at(owner, name)
            known.is_set(hop, line)
            known.is_constant, known.is_bare, known.is_fixed = False, True, False

    def is_changed(
        self,
        owner: Any,
        key: Any,
        hop: int,
        line: str,
        calls: Iterable[Call | None],
        *,
        again: bool,
    ) -> None:
        """Note that code on a hop changes a mutable value in place.

        Args:
            owner: the value.
            key: the key of the one entry that it changes, or ``ALL``.
            hop: the hop.
            line: the line.
            calls: the forward's call that it is in.
            again: whether a checkpoint's function does it, which runs once more.
        """
        self._set_by_run |= {id(owner)} if self.is_run else set()
        for place in (key,) if key is ALL else (key, BY_ARGUMENT):
            known = self.at(owner, place)
            known.is_set(hop, line, calls)
            known.written_on.add(hop)
            known.is_constant = False
            if place is not ALL and not is_content(owner):  # ``self.__dict__.pop(name)``
                known.is_traced, known.is_fixed = True, False
            known.set_again_on |= {hop} if again else set()

    def changed(self, owner: Any, key: Any, hops: set[int], where: str) -> None:
        """Something has changed, whoever did it: also code that is not traced.

        Args:
            owner: the object.
            key: a name or key in it; ``None``: its content.
            hops: on which that was seen.
            where: the line at which it was seen first.
        """
        known = self.values.get((space_of(owner), ALL if key is None else key))
        has_entries = not isinstance(owner, nn.Module) or isinstance(owner, _HOLD_ANY)
        if known is None and has_entries:  # one that only other code has named
            known = self.values.get((space_of(owner), ALL))
        is_read = (space_of(BY_NAME), key) in self.values or any(
            self.libraries.asked_for(owner, key)
        )
        if known is None and (is_read or has_entries):  # another way may read it
            known = self.at(owner, ALL if key is None else key)
        if known is not None and not (known.is_traced and key is not None):
            known.set_on |= hops
            known.written_on |= hops
            known.first_write = known.first_write or where
            # What TorchScript has made does not say which micro-batch it is of.
            known.is_bare |= isinstance(owner, torch.jit.ScriptModule)

    def sets(self, first: Container[int]) -> dict[int, str]:
        """Return the objects that are set, by the numbers of :func:`space_of`, in words.

        Args:
            first: the ids of those that were there before the forward. Modules' variables and
                classes always were.
        """
        return {
            space_of(known.owner): f"{self._named(known)} ({known.first_write})"
            for known in self.values.values()
            if known.set_on
            and (isinstance(known.owner, Names | type) or space_of(known.owner) in first)
        }

    def note_forward(self, known: SharedValue, value: Any) -> None:
        """Note that a value is a module's own ``forward``, which a call of the module runs."""
        if known.key == "forward" and isinstance(known.owner, nn.Module):
            function = getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            is_seen = code is not None and has_users_code(function)
            self._forwards[id(code) if is_seen else id(known)] = known

    def runs(self, code: types.CodeType, hop: int) -> None:
        """Note that a function of the user's begins to run on a hop."""
        if (known := self._forwards.get(id(code))) is not None:
            known.is_read(hop, f"{code.co_filename}:{code.co_firstlineno}")

    def _run_on(self, hops: Sequence[object]) -> None:
        """Nobody sees where a library's function runs that was made a module's forward."""
        for key, known in self._forwards.items():
            if key == id(known) and known.set_on:
                known.read_on |= {*range(len(hops))}
                known.first_read = known.first_read or known.first_write

    def needed_on(self, held: Mapping[int, TensorInfo]) -> None:
        """An operation asks each parameter that it reads whether it needs a gradient."""
        for known in self.values.values():
            info = held.get(id(known.owner)) if known.key == NEEDS_GRADIENT else None
            if known.set_on and info is not None and info.hops:
                known.read_on |= set(info.hops)
                known.first_read = known.first_read or info.where

    def found(
        self, reads: NamesRead, result: Recording, held: Mapping[int, TensorInfo]
    ) -> Iterator[SharedChange]:
        """The values that one hop sets and another one reads, when the forward is over.

        Args:
            reads: what the user's code reads.
            result: with its hops and calls.
            held: the parameters and buffers by id, with the hops that read them.
        """
        if len(result.hops) < 2:
            return
        self.values.update([*read_inside(self.values)])
        self.libraries.note(self.values.values(), result.calls)
        self.needed_on(held)
        self._run_on(result.hops)
        note_begun(self.values, self.of_all)
        for known, _, _ in self.each():
            if (change := self.change_of(known, reads, result)) is not None:
                yield change

    def joined(self, others: Mapping[_Where, SharedValue]) -> KnownValues:
        """Return these values with others, by place, of the same places too."""
        both = {**self.values, **others}
        for where in self.values.keys() & others.keys():
            both[where] = self.values[where].joined(others[where])
        return self.with_values(both)

    def with_values(self, values: dict[_Where, SharedValue]) -> KnownValues:
        """Return a forward's other values, by place."""
        others = KnownValues(self.paths, self.libraries, fake=self.fake)
        others.values = values
        return others

    def change_of(
        self, known: SharedValue, reads: NamesRead, result: Recording
    ) -> SharedChange | None:
        """Return the change of a value that hops share, as :meth:`found` does."""
        return self._read_elsewhere(known, reads, result) or self._lost(known, result)

    def each(self) -> Iterator[tuple[SharedValue, list[SharedValue], str]]:
        """Yield the values, each with those that overlap with it, and its name."""
        listed = (v for v in self.values.values() if id(v.owner) not in self.ignored)
        yield from ((known, self.of_all(known), self._named(known)) for known in listed)

    def only_read(self) -> dict[tuple[int, Any], list[int]]:
        """Return the places that the forward reads, on which hops, and that none of its code sets,
        nor the content that they are in: ids with keys, of a content ``None``."""
        return {
            known.place: hops_of(known.read_on)
            for known in self.values.values()
            if known.read_on
            and not any(k.is_changed for k in (known, self.found_at(known.owner, ALL)) if k)
        }

    def read_in(self) -> dict[tuple[int, Any], set[str]]:
        """Return the places that the forward reads, each with the calls that do, by path."""
        return {
            known.place: {"" if call is None else call.path for call, _ in known.read_in.values()}
            for known in self.values.values()
            if known.read_in
        }

    def assigned(self) -> set[tuple[int, Any]]:
        """Return the places that the forward sets, if only to what was there."""
        return {v.place for v in self.values.values() if v.is_changed or v.lines}

    def _read_elsewhere(
        self, known: SharedValue, reads: NamesRead, result: Recording
    ) -> SharedChange | None:
        """The change of a value that others read."""
        others = self.of_all(known)
        read_on = known.read_on.union(*(other.read_on for other in others))
        again = {back(hop) for hop in known.set_again_on if known.is_carried}
        seen = known.set_on | again | read_on
        if not known.set_on or not read_on:
            return None
        is_in_forwards = min(seen) >= 0 and not known.is_read_outside
        if len(seen) < 2 or (is_in_forwards and isinstance(known.owner, ContextVar)):
            if self._is_counted_in(known):  # each micro-batch has a context of its own
                remedy = OF_VARIABLE if len(seen) < 2 else OF_FORWARD
                return shared_change(known, "a ContextVar", read_on, known.first_read, remedy)
            return None
        if min(seen) >= 0 and self._tells_itself(known, read_on, result):
            where, what = known.first_read or others[0].first_read, self._named(known)
            if known.is_read_outside:
                result.left_for_loss += [shared_change(known, what, read_on, where, OF_LOSS)]
            return None
        is_named = not known.is_read_outside and not any(other.read_on for other in others)
        if is_named and self._is_unread(known, reads):
            return None
        where = next(k.first_read for k in (known, *others) if k.first_read)
        in_loss = any(one is value for value in self._of_loss for one in (known, *others))
        remedy = known.remedy or remedy_for(seen, again=bool(again), in_loss=in_loss)
        change = shared_change(known, self._named(known), read_on, where, remedy)
        change.is_traced = known.is_traced and known.is_fixed
        is_table = isinstance(known.owner, dict) and has_tensors(known.owner)
        if min(seen) >= 0 and (is_table or has_tensors(self.value_of(known))):
            change.is_traced = known.is_traced
            if known.comes_late(others):
                self._explain_late(change, known, others, result)
        return change

    @staticmethod
    def _is_unread(known: SharedValue, reads: NamesRead) -> bool:
        """Whether no code reads a value, whatever the trace took for a read."""
        name = attribute_of(known.owner, known.key)
        return name is not None and not known.is_unnamed and reads.is_unread(*name)

    def _explain_late(
        self, change: SharedChange, known: SharedValue, others: list[SharedValue], result: Recording
    ) -> None:
        """Give the remedy for a tensor that is set after the next forward may have read it."""
        came_on = known.came_on.union(*(other.came_on for other in others))
        read_on = {result.stage_of(hop) for hop in came_on}
        change.remedy = OF_TENSOR
        if known.made_on and known.made_on.isdisjoint(read_on):
            change.remedy, change.schedule = OF_OTHERS_TENSOR, "uncut"

    def _tells_itself(self, known: SharedValue, read_on: set[int], result: Recording) -> bool:
        """Whether, in a forward, its tensors say themselves which micro-batch they are of."""
        if not has_tensors(self.value_of(known)) or known.comes_late(self.of_all(known)):
            return False
        return known.tells_itself(read_on, result.stage_of)

    @staticmethod
    def value_of(known: SharedValue) -> Any:
        """Return what is at a place now."""
        return member_of(known.owner, known.key)

    def _lost(self, known: SharedValue, result: Recording) -> SharedChange | None:
        """The change of a value that several stages update, if one may lose another's update; or
        several hops of one stage, if the order of updates counts."""
        updates = [k for k in (known, *self.of_all(known)) if k.lost_on & known.set_on]
        stages = {result.stage_of(hop) for hop in hops_of(known.set_on)}
        if len(stages) < 2 and len(known.set_on & known.ordered_on) > 1:
            where, name = known.first_write, self._named(known)
            return shared_change(known, name, known.ordered_on, where, OF_ORDER)
        if not updates or len(stages) < 2:  # the hops of one stage run in one thread
            return None
        if min(known.set_on) >= 0 and self._tells_itself(known, known.counted_on, result):
            return None
        lost_on = known.set_on.intersection(set[int]().union(*(k.lost_on for k in updates)))
        where, name = updates[0].first_loss, self._named(known)
        return shared_change(known, name, lost_on, where, OF_UPDATE)

    def _is_counted_in(self, known: SharedValue) -> bool:
        """Whether it is a context variable in which each forward, or one now and then, leaves
        something for the next."""
        variable, before = self.variables.get(id(known.owner), (None, None))
        if variable is None or not known.is_carried:
            return False
        return id(variable) not in self._set_by_run or frozen(variable.get(None)) != before

    @property
    def looks_up(self) -> bool:
        """Whether a backward looks entries up by keys that are not known: forwards may set entries
        of the same keys, or each one its own. Or it may read an object that the forward has made,
        and that the next forward may find."""
        return self._is_unsure or any(
            known.key is BY_ARGUMENT and known.read_on for known in self.values.values()
        )

    def carried(self, reads: NamesRead) -> Iterator[CarriedValue]:
        """The values that one forward leaves for the next one.

        Args:
            reads: what the user's code reads.
        """
        for known in self.values.values():
            is_read = known.read_on and not self._is_unread(known, reads)
            if known.is_carried and known.set_on and is_read:
                place = known.held_by or (known.owner, None if known.key is ALL else known.key)
                where = space_of(place[0]), place[1]
                hops = hops_of(known.set_on)
                yield CarriedValue(self._named(known), known.first_read, hops, where)

    def sets_by_call(self) -> Iterator[tuple[str, Call | None, str]]:
        """Yield the values that are set, each with a call that sets it, and the line. Of a module's
        attribute a tensor in it is left out."""
        for known in self.values.values():
            is_kept = isinstance(known.owner, nn.Module) and not known.is_bare
            if id(known.owner) not in self.ignored and not is_kept:
                yield from ((self._named(known), call, line) for call, line in known.set_in)

    def reads_by_call(self) -> Iterator[tuple[str, Call | None, str]]:
        """Yield the values that one forward leaves for the next one, as :meth:`sets_by_call`."""
        for known in self.values.values():
            if known.is_carried and known.set_in and id(known.owner) not in self.ignored:
                yield from ((self._named(known), *read) for read in known.read_in.values())

    def of_all(self, known: SharedValue) -> list[SharedValue]:
        """Return the values that overlap: a container's entries for its whole content, or the
        reverse. What sets any of a module's variables leaves alone those that it defines."""
        if known.key is ALL:
            number, listed = space_of(known.owner), self.values.items()
            found = [v for (space, _), v in listed if space == number and v is not known]
            if not isinstance(known.owner, Names | type):
                return found
            return [v for v in found if v.set_on or not isinstance(self.value_of(v), CODE)]
        whole = self.found_at(known.owner, ALL)
        return [] if whole is None else [whole]

    def _named(self, known: SharedValue) -> str:
        return named(known.owner, known.key, self.paths)
