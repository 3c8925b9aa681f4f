"""Look at a forward again after a step that has done what it did not do when it was recorded.

A recording sees one micro-batch. Another one, whose data lead it elsewhere, may set a value that a
stage of a micro-batch beside it reads. The values that a step has changed are compared with those
that the recording has, and if there are others, the step's own micro-batches are recorded until
one of them changes that value: that recording says who reads it.
"""

from __future__ import annotations

import logging
import types
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import nn

from ..._common.callsite import users_line, warn
from ..._common.coverage.uncovered_code import CodeReached
from ..._common.threads.model_turns import alone_recording
from ...batches.microbatch import Microbatch
from ...crossing.carried_values import is_among, name_of
from ...errors import BlockpipeError, StateError
from ...recording.calls import hops_by_path
from ...recording.plain_values.places import hops_at, in_words
from ...recording.recording import Recording
from ...restoring.held_signals import RestoredWhole
from ...restoring.holders import ContentHolder, DictHolder
from ...schedules.builders import ScheduleOption
from ...weights.placement import Fingerprint
from ..prepared import Prepared
from ..shared_state import check_changes, check_shared_state, opened_since
from ..watched.seen import UNSET, is_plain
from ..watched.watched_values import MOST_VALUES, Change
from .second_paths import SecondPaths
from .ways import check_ways

_log = logging.getLogger(__name__)
_MOST = 16  # recordings for values; a guess
_CONTAINERS = (dict, list, set, deque)


class _Late(NamedTuple):
    """A tensor or a value that a step has written by code that no recording shows.

    Attributes:
        name: of it.
        path: of the module that it is on, if it is one's.
        read_on: the hops that read it.
        set_on: the hops on which, as the source tells, a branch may write it.
    """

    name: str
    path: str | None
    read_on: set[int]
    set_on: set[int]

    def writers(self, on: Mapping[str, set[int]]) -> set[int]:
        """Return the hops that may have written it, given those on which each module runs."""
        return self.set_on or (on.get(self.path, set()) if self.path else set())

    def is_of_others(self, on: Mapping[str, set[int]]) -> bool:
        """Return whether another hop has written it for sure."""
        found = self.writers(on)
        return bool(found) and found.isdisjoint(self.read_on)


class SecondLooks:
    """The recordings that are made after steps.

    Args:
        model: the user's model.

    Attributes:
        written_late: what a step has written that no recording shows; later ones run their
            micro-batches one by one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.written_late, self._paths = model, "", SecondPaths()
        self._left = _MOST  # below zero: nobody looks any more
        # By place: a change keeps its object alive, so that no other one gets the id.
        self._seen: dict[tuple[int, Hashable, bool], Change] = {}
        self._ahead: list[Change] = []  # of steps whose micro-batches could not mix
        self._of_one_stage: dict[int, Any] = {}  # containers, by id

    def at_values(
        self,
        known: Recording,
        changed: Sequence[Change],
        batches: Sequence[Microbatch],
        schedule: ScheduleOption,
        record: Callable[[Microbatch], Recording],
    ) -> None:
        """Record the micro-batches of a step that has changed values which the recording had not.

        Args:
            known: the recording that the step ran by.
            changed: what it has changed.
            batches: the micro-batches, if they could mix.
            schedule: by which they ran.
            record: records one of them.

        Raises:
            StateError: several hops share such a value.
        """
        if len(known.hops) < 2 or schedule in ("uncut", "sequential") or self._left < 0:
            return
        self._ahead += [change for change in changed if self._is_new(change, known)]
        if not batches or not self._ahead:
            return
        names, latest = self._names(self._ahead), known
        for batch in batches:
            if not self._left:
                self._give_up(names)
                break
            self._left -= 1
            # If an interrupt ends it, the next step looks again.
            found = self._recorded(batch, record)
            try:
                check_ways(known, found, schedule)
                # What a first step makes before others need it, this one has made among them.
                check_changes(() if known.settles else found.made_once)
            except StateError as error:
                self._ahead = []
                _refuse(names, "set", error)
            left = [change for change in self._ahead if not _is_known(change, found)]
            self._note_own([c for c in self._ahead if c not in left], known)
            self._ahead = [change for change in left if not self._is_own(change)]
            if not self._ahead:
                return
            latest = found
        # What was not there before, a forward may have made when it first needed it.
        before = (c for c in self._ahead if c.key is None or c.then is not UNSET)
        late = [c for c in before if c.key is None or is_plain(c.then)]
        self._ahead = []
        if self._left >= 0:
            self._note_late([self._late_value(change, latest) for change in late], latest)

    def at_code(
        self,
        prepared: Prepared,
        reached: Mapping[int, CodeReached],
        batches: Sequence[Microbatch],
        changed: Sequence[Change],
        schedule: ScheduleOption,
        record: Callable[..., Recording],
    ) -> None:
        """Do what :meth:`SecondPaths.look` says."""
        unsure = self._paths.look(prepared, reached, batches, changed, schedule, record)
        if unsure and not self.written_late:
            self.written_late = f"what nobody knows ({unsure})"

    def at_recomputed(self, known: Recording, changed: Sequence[Change]) -> None:
        """Check that no recomputation of a step has read a value that the step has set, where it
        was not compared with what had been saved. From then on, it is.

        Args:
            known: the recording that the step ran by.
            changed: what it has changed.

        Raises:
            StateError: one has.
        """
        again = known.read_again
        found = [change for change in changed if is_among(again, change.holder, change.key)]
        if found:
            known.recomputes_otherwise = True
            raise StateError(
                f"{', '.join(self._names(found))} was set during the step, which it was not when "
                "the model was recorded, and a module that is recomputed reads it: it may have "
                "found what a later micro-batch has set, and this step's gradients may not be the "
                "plain loop's; from now on, what is recomputed is compared; pass the value to the "
                f"module as an argument, or mark it with checkpoint=False ({users_line()})"
            )

    def at_tensors(
        self,
        found: Recording,
        known: Recording,
        schedule: ScheduleOption,
        written: Mapping[str, Sequence[int]],
    ) -> None:
        """Check that only one hop uses what a step has written first.

        Args:
            found: a recording of one of its micro-batches, made after it.
            known: the recording that it ran by.
            schedule: by which it ran.
            written: the names of such tensors, with the hops that read them.

        Raises:
            StateError: several hops share it, or what ran sealed reads other stages' tensors.
        """
        _log.info("recorded anew: %s", f"{', '.join(written)} is written by now")
        try:
            check_shared_state(found, schedule)
            if (call := opened_since(known, found)) is not None:
                raise StateError(
                    f"by now {call.path!r} has to be looked into: {call.opened}; set the gradients "
                    "to None and repeat the step, which is recorded anew"
                )
        except StateError as error:
            _refuse([*written], "written", error)
        late = (name for name in written if not _shows_write(found, name))
        self._note_late([self._late_tensor(n, written[n], found) for n in late], found)

    def _late_tensor(self, name: str, read_on: Iterable[int], found: Recording) -> _Late:
        path, _, key = name.rpartition(".")
        module = dict(self._model.named_modules()).get(path)
        set_on = set[int]() if module is None else hops_at(found.may_set, module, key)
        value = None if module is None else vars(module).get(key)
        own = {h.name for h in (*found.parameters, *found.buffers) if name in h.names}
        for outside in found.outside:
            is_it = outside.tensor is not None and value is not None and outside.tensor() is value
            begins = f"{outside.name} ({outside.where}"
            own |= {begins} if is_it or name.startswith(begins) else set()
        by_name = (found.may_write, found.written_beside)
        set_on = set_on.union(*(names.get(one, ()) for names in by_name for one in own))
        return _Late(name, path or None, {*read_on}, set_on)

    def _late_value(self, change: Change, found: Recording) -> _Late:
        owner, key = change.holder.owner, name_of(change.key)
        paths = {id(module): path for path, module in self._model.named_modules()}
        name = in_words(owner, key, paths)
        return _Late(
            name,
            paths.get(id(owner)),
            hops_at(found.only_read, owner, key),
            hops_at(found.may_set, owner, key),
        )

    def _note_late(self, places: Sequence[_Late], found: Recording) -> None:
        """Note what a step has written by code that no recording shows, and what a stage reads.
        Where the source tells of no branch that writes it, a module writes its own.

        Raises:
            StateError: another hop writes it.
        """
        on = hops_by_path(found.calls)
        late = [one for one in places if one.read_on and one.writers(on) != one.read_on]
        if not late:
            return
        names = ", ".join(one.name for one in late)
        hops = sorted(set[int]().union(*(one.read_on for one in late)))
        self.written_late = self.written_late or names
        text = (
            f"{names} was written during the step by code that no recording shows, as in a branch "
            f"that it takes now and then, and is read on hops {hops}: {{}}; from now on "
            "micro-batches run one by one; write it between steps, or on the stage that reads it, "
            f"or use schedule='sequential' ({users_line()})"
        )
        if any(one.is_of_others(on) for one in late):
            raise StateError(
                text.format(
                    "micro-batches under way at once have mixed in it, and this step's gradients "
                    "are not the plain loop's"
                )
            )
        warn(text.format("where another stage writes it, this step's gradients are others"))

    def _recorded(self, batch: Microbatch, record: Callable[[Microbatch], Recording]) -> Recording:
        try:
            undone = (change.undone() for change in self._ahead)
            with alone_recording(self._model), RestoredWhole(*undone):
                return record(batch)
        except BlockpipeError:
            self._ahead = []
            raise

    def _note_own(self, changes: Iterable[Change], known: Recording) -> None:
        """Note the containers in which one stage alone sets and reads all that is known: another
        key of data is that stage's as well."""
        ways = [] if known.way is None else [known.way, *(one.way for one in known.way.others)]
        for change in changes:
            owner = change.holder.owner
            hops = set[int]().union(*(way.hops_using(id(owner)) for way in ways))
            stages = {known.stage_of(hop) for hop in hops if hop >= 0}
            if isinstance(owner, _CONTAINERS) and len(stages) == 1 and min(hops) >= 0:
                self._of_one_stage[id(owner)] = owner

    def _is_own(self, change: Change) -> bool:
        """Return whether a change is in such a container, or in one that is an entry of it."""
        owner, held = change.holder.owner, self._of_one_stage
        return id(owner) in held or any(
            isinstance(one, dict) and any(member is owner for member in dict.values(one))
            for one in held.values()
        )

    def _is_new(self, change: Change, known: Recording) -> bool:
        where = id(change.holder.owner), change.key
        if isinstance(change.holder, ContentHolder) and where not in known.only_read:
            return False  # the caller's, or what a hook writes
        if self._is_own(change):
            return False
        # What a read has made may be set later.
        is_made = change.then is UNSET and isinstance(change.holder.owner, defaultdict)
        way = *where, is_made
        if way in self._seen or len(self._seen) == MOST_VALUES:  # a history has ever more
            return False
        self._seen[way] = change
        return not _is_known(change, known)

    def _names(self, changes: Sequence[Change]) -> list[str]:
        paths = {id(module): path for path, module in self._model.named_modules()}
        return [in_words(c.holder.owner, name_of(c.key), paths) for c in changes]

    def _give_up(self, names: list[str]) -> None:
        self._left = -1
        warn(
            f"the forward has set {', '.join(names)}, which it did not when it was recorded, as "
            f"other values in {_MOST} micro-batches before: from now on, nobody looks whether "
            "another stage reads such a value; return it, keep it in a tensor with an entry for "
            f"each, or use schedule='sequential' ({users_line()})"
        )


def changes_of_modes(fingerprint: Fingerprint | None) -> Iterator[Change]:
    """Yield the switches of modules that a step has changed."""
    for module, name, then in () if fingerprint is None else fingerprint.turned():
        yield Change(DictHolder(vars(module), module), name, then)


def _refuse(names: list[str], how: str, error: StateError) -> NoReturn:
    raise StateError(
        f"{', '.join(names)} was {how} during the step, which it was not when the model was "
        f"recorded, and this step's gradients may not be the plain loop's: {error} ({users_line()})"
    ) from None


def _is_known(change: Change, recording: Recording) -> bool:
    owner, key = change.holder.owner, change.key
    if isinstance(owner, types.FunctionType):  # a variable, which several functions read
        return any(name == key for _, name in recording.changed)
    places = {(id(owner), name_of(key)), (id(owner), None)}
    return any(not places.isdisjoint(of) for of in (recording.changed, recording.set_beside))


def _shows_write(recording: Recording, name: str) -> bool:
    """Return whether a recording shows a write to a tensor."""
    held = (h for h in (*recording.parameters, *recording.buffers) if name in h.names)
    if name in recording.changing or any(h.written for h in held):
        return True
    return any(o.written and name.startswith(f"{o.name} ({o.where};") for o in recording.outside)
