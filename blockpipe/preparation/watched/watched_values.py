"""Watch the plain values that user code sets between steps and that the forward branches on.

If a training loop sets ``net.step = i`` or ``config.mode = "distill"``, and a forward has ``if
self.step >= self.warm_up``, a later step may take another branch than the recorded one. So the key
of a recording includes all values that have ever changed between steps, wherever the forward may
read them: on modules, in configurations, dictionaries and globals, in the environment.

A number may change in every step, and to record at every change would be to record in every step.
So the recording gives the forward numbers that remember the comparisons made with them, and each
step makes the same comparisons again. A float with such an integer on its right (``0.1 *
self.step``) computes a plain number, because Python does not call the integer's methods there. A
recording that was given the number itself (``f"{self.step}"``) holds for that one value.

Other objects count as well: ``seen`` says what of them is compared.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..._common.libraries import is_users
from ..._torch.graph import hooks_of_leaf
from ..._torch.modules import buffers_of
from ...restoring.held_signals import RestoredWhole
from ...restoring.holders import (
    DictHolder,
    Holder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
)
from ...restoring.model_state import ModelState, holders_read
from .contents import is_data
from .members import TORCHS, is_known, is_read, is_torchs_variable, may_fill, seen_members
from .reading import (
    MemberReads,
    are_same,
    frozen,
    has_names,
    looked_at_in,
    plain_space,
    which_are_same,
)
from .seen import (
    UNSET,
    Code,
    Itself,
    content,
    is_object_of_before,
    is_plain,
    is_same,
    is_tensors,
    label,
    one_look,
    seen,
)
from .watched_numbers import Asked, Questions, Where, answer, watched
from .written_arrays import WrittenArrays

MOST_VALUES = 2_000  # the nearest ones; they are compared before and after each step
_MOST_RETURNS = 8  # distinct values of one place; one with more is a counter or a clock
_STEPS = 2  # the steps that show which values the forward itself sets
_MOST_NEW = 4  # names that may be added to or removed from one object
_SWITCHES = {bool, type(None)}


Place = tuple[Holder, Hashable]
"""A name or key in an object."""


@dataclass
class _Place:
    """A place whose value has changed at least once."""

    holder: Holder  # keeps its object alive, so that no other one gets its id
    key: Hashable
    labels: set[Hashable] = field(default_factory=set)
    latest: Any = UNSET  # the object that was here, as it was when it came
    content: Hashable = None

    def value(self) -> Any:
        if isinstance(self.holder, SetHolder):
            return frozen(self.holder)
        space = plain_space(self.holder)
        try:
            return dict(self.holder.now())[self.key] if space is None else space[self.key]
        except LookupError:
            return UNSET

    def label(self) -> Hashable:
        """Return the part of a key for what is here now."""
        value = self.value()
        if is_plain(value) or is_data(value):
            self.latest, self.content = UNSET, None
        elif value is not self.latest:
            self.latest, self.content = value, content(value)
        return label(seen(value)), self.content


@dataclass(frozen=True)
class Change:
    """A value that a step has changed.

    Attributes:
        holder: of the object.
        key: a name or key in it.
        then: the plain value that was there before; of others, nothing is kept.
    """

    holder: Holder
    key: Hashable
    then: Any

    def now(self) -> Any:
        """Return the value that is there now."""
        return dict(self.holder.now()).get(self.key, UNSET)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Have a plain value of before there while entered."""
        holder, key, then = self.holder, self.key, self.then
        now = self.now()
        able = DictHolder if then is UNSET else DictHolder | SequenceHolder | SlotsHolder
        if now is UNSET or not is_plain(then) or not isinstance(holder, able):
            yield
            return
        if isinstance(holder, DictHolder) and then is UNSET:
            after = holder.as_it_is()  # a key that is put in again would be the last one
            try:
                holder.remove(key)
                yield
            finally:
                after.restore()
            return
        try:
            holder.put(key, then)
            yield
        finally:
            holder.put(key, now)


class WatchedValues:
    """The plain values that a model's forwards may read, and the comparisons made with them.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[int, nn.Module] = {}  # by id
        self._torchs: set[int] = set()  # the dictionaries of modules, by id
        self._switches: set[Where] = set()  # which Fingerprint compares
        self._forget()
        self._is_whole = True  # unless an interrupt has ended a look half-way
        self._places: dict[Where, _Place] = {}  # the places whose values have changed
        self._questions = Questions()
        self._came: Counter[int] = Counter()  # by object, the names that were added or removed
        self._replaced: Counter[Where] = Counter()  # by place, the objects that were looked into
        self._changes: list[Change] = []  # of steps, that nobody has been told of
        self._has_turned = False

    def _forget(self) -> None:
        self._is_whole = False
        self._holders: list[Holder] = []
        self._members: list[dict[Hashable, Any]] = []  # what is seen of each holder's
        self._reads = MemberReads()  # of members, by holder
        self._known = set[Any]()  # spaces with a name in them that a holder has
        self._own: set[Where] = set()  # the places that the forward itself sets
        self._arrays = WrittenArrays([])
        self._steps = 0  # since the last look_around()
        self._count = 0  # of plain values
        self._values = self._reads.now()

    def look_around(self) -> None:
        """Find the values that a forward may read; called before a recording."""
        self._look(by_forward=False)  # what was set before a report is asked for, counts
        self._has_turned |= not self._is_whole
        self._modules = {id(module): module for module in self._model.modules()}
        of_torch = (vars(module).items() for module in self._modules.values())
        self._torchs = {id(value) for own in of_torch for key, value in own if key in TORCHS}
        self._switches = {
            (id(module), key)
            for module in self._modules.values()
            for key, value in vars(module).items()
            if isinstance(value, bool | str)
        }
        users = (m for m in self._modules.values() if is_users(type(m).__module__))
        self._torchs -= {id(buffers_of(module)) for module in users}
        self._forget()
        holders = [*holders_read(self._model)]
        self._take(holders)
        self._arrays = WrittenArrays(holders)
        on_parameters = [h for p in self._model.parameters() for h in hooks_of_leaf(p)]
        self._take(ModelState(values=False, contents=False, others=on_parameters).holders)
        self._values = self._reads.now()
        self._is_whole = True

    def _take(self, holders: Iterable[Holder]) -> None:
        """Watch more objects, as they are now."""
        for holder in holders:
            if id(holder.owner) in self._torchs or not is_read(holder):
                continue
            members = {
                key: value
                for key, value in self._members_of(holder).items()
                if (holder.space_id(), key) not in self._known
            }
            if not members and not may_fill(holder):
                continue
            self._known.update((holder.space_id(), key) for key in members)
            self._count += sum(not isinstance(value, Code | Itself) for value in members.values())
            if self._count > MOST_VALUES:
                break
            self._holders.append(holder)
            self._members.append(members)
            self._reads.add(holder, members)

    def _look_into(self, where: Where, value: Any) -> None:
        """Watch what an object leads to that has come since the last recording."""
        if self._replaced[where] < _MOST_RETURNS:
            self._replaced[where] += 1
            others = () if isinstance(value, nn.Module) else (value,)
            self._take(ModelState(values=False, contents=False, others=others).holders)

    def _members_of(self, holder: Holder) -> dict[Hashable, Any]:
        found, owner = seen_members(holder), holder.owner
        if owner is os.environ:
            return {key: value for key, value in found.items() if not is_torchs_variable(key)}
        if id(owner) not in self._modules:
            return found
        return {
            key: value
            for key, value in found.items()
            if (id(owner), key) not in self._switches and not is_known(owner, key, value)
        }

    def has_turned(self) -> bool:
        """Return whether, since the last call, a value has changed for the first time. The keys of
        the recordings made so far do not include that value. After a look that an interrupt has
        ended half-way, nobody knows, and the next one begins anew."""
        self._look(by_forward=False)
        if not self._is_whole:
            self._forget()
        has_turned, self._has_turned = self._has_turned, False
        self._arrays.step_begins()
        return has_turned or not self._is_whole

    def step_is_over(self) -> list[Change]:
        """Note the values that the forward itself has set, which have changed since
        :meth:`has_turned`.

        Such a value is a counter, or keeps the last of something, and does not count. A boolean
        does count: it leads the next forward another way. The first steps show all such values.

        Returns:
            The changes of this step.
        """
        self._look(by_forward=True)
        self._steps += 1
        changes, self._changes = self._changes, []
        return changes + [Change(array, None, Code()) for array in self._arrays.written()]

    def set_since(self) -> Callable[[], Iterator[Place]]:
        """Return what tells of the values that are others than at the latest look."""
        reads, values = self._reads, self._values
        known = [*zip(self._holders, self._members, strict=True)]

        def found() -> Iterator[Place]:
            with suppress(LookupError):  # a name was removed
                if are_same(reads.now(), values):
                    return
            for holder, before in known:
                now = self._members_of(holder)
                for key in _names(holder, before, now):
                    if not is_same(before.get(key, UNSET), now.get(key, UNSET)):
                        yield holder, key

        return found

    def _look(self, *, by_forward: bool) -> None:
        if self._is_whole:
            self._is_whole = False
            with one_look():
                self._look_at_all(by_forward=by_forward)
            self._is_whole = True

    def _look_at_all(self, *, by_forward: bool) -> None:
        is_first = self._steps < _STEPS  # and which object it is, counts
        try:
            now = self._reads.now()
        except LookupError:  # a name was removed
            same = [False] * len(self._holders)
        else:
            if not is_first and are_same(now, self._values):
                return
            same = which_are_same(now, self._values)
            if is_first:  # another tensor may be alike
                same = [
                    is_alike and not of for is_alike, of in zip(same, now.looked_at, strict=True)
                ]
        for index in [index for index, is_alike in enumerate(same) if not is_alike]:
            self._compare(index, self._holders[index], by_forward=by_forward)
        self._values = self._reads.now()

    def _compare(self, index: int, holder: Holder, *, by_forward: bool) -> None:
        before, members = self._members[index], self._members_of(holder)
        are_told = has_names(holder) and members  # those that have come or gone
        if by_forward and not are_told and self._reads.size(index) != self._values.sizes[index]:
            self._changes.append(Change(holder, None, Code()))
        names = _names(holder, before, members)
        for key in names:
            then, value = before.get(key, UNSET), members.get(key, UNSET)
            where = holder.space_id(), key
            # What a module's tensor is, an operation is asked.
            is_asked = has_names(holder) and (is_tensors(then) or is_tensors(value))
            if by_forward and not is_asked and not is_object_of_before(then, value):
                self._changes.append(Change(holder, key, then if is_plain(then) else Code()))
            if by_forward and self._steps < _STEPS:
                is_default = then is UNSET and isinstance(holder.owner, defaultdict)
                if is_object_of_before(then, value) or is_default:
                    continue
                if not {type(then), type(value)} <= _SWITCHES:
                    self._own.add(where)
                    continue
            if not is_same(then, value):
                self._turn(holder, key, is_new=then is UNSET or value is UNSET)
            elif isinstance(value, Itself) and not is_object_of_before(then, value):
                self._look_into(where, value.value)
        members = {key: members[key] for key in members if key in names}
        if members.keys() != before.keys() or looked_at_in(members) != looked_at_in(before):
            self._reads.read_again(index, holder, members)
        self._members[index] = members

    def _turn(self, holder: Holder, key: Hashable, *, is_new: bool) -> None:
        where = holder.space_id(), key
        if where in self._places or where in self._own:
            return
        if is_new:  # or removed; an object with many such names is a history
            self._came[where[0]] += 1
            if not has_names(holder) or self._came[where[0]] > _MOST_NEW:
                return
        self._places[where] = _Place(holder, key)
        self._has_turned = True

    def known_by(self) -> tuple[Hashable, ...]:
        """Return the key of a recording: the values that have ever changed."""
        self._questions.step_begins()
        labels, are_others = [], False
        is_whole, self._is_whole = self._is_whole, False
        for where, place in self._places.items():
            if len(place.labels) <= _MOST_RETURNS:
                latest, found = place.latest, place.label()
                if place.latest is not latest and place.latest is not UNSET:
                    self._look_into(where, place.latest)
                    are_others = True
                place.labels.add(found)
                labels.append(found)
        if are_others:
            with suppress(LookupError):  # another thread has removed a name meanwhile
                self._values = self._reads.now()
        self._is_whole = is_whole
        return tuple(labels)

    def holds(self, asked: Asked) -> bool:
        """Return whether a recording's questions about numbers have the same answers now."""
        return all(answer(question, self._value_at) == before for question, before in asked)

    def is_recorded(self, unread: Collection[str]) -> str:
        """End a recording, and return the line at which it has used a number that changes too often
        for a recording of each value; empty: it has used none.

        Args:
            unread: the attributes that no code reads, by path and name.
        """
        self._questions.end(unread)
        return self._questions.given_at

    def answered(self) -> Asked:
        """Return the questions of the latest recording, with the answers of now."""
        return self._questions.answered(self._value_at)

    def _value_at(self, where: Where) -> Any:
        return self._places[where].value()

    def asked(self) -> RestoredWhole[Callable[[Any, str], None] | None]:
        """Replace those numbers, during a recording, by ones that remember comparisons.

        Yields:
            What has to be told of each index that the forward uses, with the line; ``None``: there
            are no such numbers.
        """
        return RestoredWhole(self._asked())

    @contextmanager
    def _asked(self) -> Iterator[Callable[[Any, str], None] | None]:
        before = []
        self._questions.begin()
        try:
            for where, place in self._places.items():
                value = place.value()
                given = watched(value, (), self._questions.ask, where)
                if given is not value:
                    before.append((place, value))
                    place.holder.put(place.key, given)
            yield self._questions.used if before else None
        finally:
            for place, value in before:
                place.holder.put(place.key, value)


def _names(
    holder: Holder, then: Mapping[Hashable, Any], now: Mapping[Hashable, Any]
) -> Set[Hashable]:
    """Return the names or keys to compare: of what cannot get others, those that were looked at."""
    return then.keys() | now.keys() if has_names(holder) else then.keys()
