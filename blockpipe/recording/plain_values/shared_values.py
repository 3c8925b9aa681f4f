"""Find plain values that one hop sets and another one reads.

Examples are a number on an object that modules of two stages hold, a global, or an entry of a
dictionary. A tensor carries a tag that says which micro-batch made it. A number carries none, and
objects do not report reads, so the recording traces them: while the forward runs, Python calls a
trace function at each instruction of the user's code, and the source says which value it reads or
sets. Only plain values that outlive the forward count: tensors are checked when they are read.
"""

from __future__ import annotations

import ast
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..._common.coverage.covered_code import Coverage
from ..._common.libraries import has_users_code
from ...restoring.holders import Holder
from ...restoring.iterators import advances
from ...restoring.model_state import names_in
from ..calls import Call
from ..entries import GeneratorUse
from ..library_reads import LibraryReads
from ..reads import NamesRead
from .arrays import of_whole_arrays
from .drawn_numbers import DrawnNumbers, draws_from
from .evaluation.by_call import asked_by_call, set_by_call, set_by_method
from .evaluation.expressions import Frame
from .evaluation.index_uses import IndexUses
from .evaluation.members import ALL, TRAINS, UNKNOWN, WHOLE, member_of, owners_of
from .evaluation.registered import places_of
from .evaluation.sizes import Sizes
from .evaluation.still_frames import StillFrame
from .known_values import KnownValues
from .lost_updates import read_how
from .missed.missed_branches import MissedBranches, Noting
from .missed.other_ways import Way, lasting_in
from .not_put_back import ClassesKept, Effect, asks_cache, effect_of, found_among
from .places import (
    entry_asked,
    entry_of,
    has_memory,
    is_by_microbatch,
    is_content,
    is_looked_into,
    is_of_module,
    makes_entry,
    read_inside,
    sets_entry,
    shares_memory,
    space_of,
    used_by,
)
from .questions.open_questions import any_open
from .remedies import OF_ARRAY, OF_CHECKPOINT
from .still_code import (
    Later,
    frames_of,
    functions_by_code,
    hands_on,
    hands_to_autograd,
    named_of_unknown,
)
from .syntax.accesses import Access, accesses_of, is_optional
from .syntax.changes import may_leave
from .syntax.effects import EMPTIES, arguments_of, changes_given
from .syntax.uses import Use
from .tensors.missed_tensors import MissedTensors
from .tensors.tensor_uses import TensorUses
from .tensors.untaken_branches import UntakenBranches
from .tracing.lasting import Lasting
from .tracing.pending_writes import PendingWrites
from .tracing.traced_code import TracedCode
from .values import ApartRun, back


class SharedValues:
    """Watch one forward for values that hops share.

    Args:
        holders: the holders of all objects that can be reached from the model, and from modes.
        put_back: the first of them; those of objects beyond that the forward changes are added.
        modules: the model's modules, by path.
        hop: returns the hop that the forward is on.
        call: returns the innermost call that is under way.
        fake: whether it runs on fake tensors; then no value depends on the data.
        traces: whether to trace it even if no code of the user's is around the model.
    """

    def __init__(
        self,
        holders: Iterable[Holder],
        put_back: list[Holder],
        modules: dict[str, nn.Module],
        hop: Callable[[], int],
        call: Callable[[], Call | None],
        *,
        fake: bool,
        traces: bool,
    ) -> None:
        self._hop, self._call = hop, call
        self.lasting = Lasting(holders, put_back, modules)
        self._functions = functions_by_code(holder.owner for holder in holders)
        self.tensors, self.draws = TensorUses(), DrawnNumbers(holders)
        self.indices = IndexUses(None)
        self.on_read: Callable[[Any, Any, types.FrameType, bool], None] = lambda *found: None
        users = [f for same in self._functions.values() for f in same if has_users_code(f)]
        self.traces = traces or bool(users)
        self._may_leave = any(may_leave(f.__code__) for f in users)
        said = {name for f in users for name in names_in(f.__code__)}
        self._replaces_all, self.toggles = not said.isdisjoint(WHOLE), not said.isdisjoint(TRAINS)
        self.known = KnownValues(self.lasting.names, LibraryReads(holders, modules), fake=fake)
        itself: Any = weakref.proxy(self)  # a cycle would keep tensors of the frames
        self.sizes = Sizes(self.lasting.has, self.known, fake=fake)
        self._used_up = found_among(holders)  # refused if the forward uses them, by id
        self._stays: Effect | None = None  # the first that cannot be put back
        self._classes = ClassesKept(modules)
        self._pending = PendingWrites(self.known, self.sizes, fake=fake)
        note, still = partial(SharedValues._note_all, itself), SharedValues._note_still
        late = partial(SharedValues._beside, itself, lasts=False)
        noting = Noting(partial(note, over=True), partial(still, itself), late)
        self.missed, self.untaken = MissedTensors(self.known), UntakenBranches(self.known)
        beside = noting, self.missed, self.untaken
        branches = MissedBranches(self.known, self.sizes, *beside, call=call, fake=fake)
        run = self.known, self._functions, self._pending, branches, hop
        self.coverage = Coverage([*modules.values(), *(holder.owner for holder in holders)])
        self._code = TracedCode(*run, note, self.coverage)
        self._still: ApartRun | None = None  # code that is looked at, and does not run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace this thread's code in a block."""
        if not self.traces:
            yield
            return
        try:
            with self._code.traced():
                yield
        finally:
            self.lasting.taken_in.forget()

    def runs_beside(
        self, function: Callable[..., Any], given: object, hop: int, *, lasts: bool = False
    ) -> None:
        """Note what code may set, or read, that a step runs beside the forward.

        Args:
            function: the user's function.
            given: its first argument, if that is known.
            hop: the hop that it is on, or the number of that hop's backward.
            lasts: whether everything that it uses was there before the forward.
        """
        self._beside([*frames_of(function, given)], hop, given, lasts=lasts)

    def loss_runs(self, loss_fn: Callable[..., Any], hop: int, *, cut: bool) -> None:
        """Note what a loss function on a hop may set, or read, and what it hands to autograd.

        Args:
            loss_fn: the user's function.
            hop: the hop.
            cut: whether each hop has a backward of its own.
        """
        later = Later([], [], [])
        with self.known.beside_loss():
            self._beside([*frames_of(loss_fn, later=later)], hop, lasts=True)
        self.untaken.runs_again(later.rerun, hop)
        if cut and (found := [*later.called, *later.again]):
            self._beside(found, back(hop), lasts=True)
        elif cut and hands_to_autograd(loss_fn):  # nobody knows what
            self.runs_beside(loss_fn, None, back(hop), lasts=True)

    def _beside(
        self, frames: list[StillFrame], hop: int, given: object = None, *, lasts: bool
    ) -> None:
        self._still, self.lasting.has_all = ApartRun(), lasts
        self.draws.note(frames, hop)
        for still in frames:
            self._still.code = still.f_code
            if not lasts:  # a variable of the forward's is another one for each micro-batch
                still.f_cells = {}
            self._note_still(still, hop, given)
        self._still = None

    def _note_still(self, still: StillFrame, hop: int, given: object = None) -> None:
        """Note the accesses of a function that does not run."""
        self.coverage.read.add(still.f_code)
        for accesses in accesses_of(still.f_code).values():
            still.f_lineno = accesses[0].node.lineno
            frame = Frame(still, {}, None)  # type: ignore[arg-type]
            if self._still is None and self.missed.is_closed(accesses[0].node, frame):
                continue
            self._note_all(accesses, still, hop, over=True)
            if self._still is not None:
                self.tensors.note(accesses, frame, given, hop)

    def _note_all(
        self, accesses: Iterable[Access], running: Any, hop: int, *, over: bool = False
    ) -> None:
        frame = Frame(running, self._functions, self._code.returned.get(id(running)))
        self.known.is_run = not over
        for access in accesses:
            frame.line = frame.line_of(access.node) if over else frame.line
            try:
                if access.is_call:
                    self._note_call(access, frame, hop)
                else:
                    self._note(access, frame, hop, runs=not over)
                self.indices.look_at(access, frame)
            except Exception:  # of an object that cannot be looked at
                continue
            if over:
                self._pending.end(id(running), to_anything=True)

    def _note(self, access: Access, frame: Frame, hop: int, *, runs: bool) -> None:
        if not self.known.is_of_other_sizes:  # no recording goes there
            self.draws.told(access, frame, hop, runs=runs and self._still is None)
            self._stays = self._stays or asks_cache(access, frame)
        for one in self.draws.used(access, frame, all_last=self.lasting.has_all):
            draws_from(self.known.at(one, ALL), hop, frame.line, self._calls())
        if (places := set_by_method(access.node, frame)) is not None:
            is_open = any_open(arguments_of(access.node), frame, self.known)
            lasting = [place for place in places if self.lasting.has(place[0])]
            self._will_set(lasting, access, frame, hop, is_fixed=not is_open)
            return
        owner, key, value = of_whole_arrays(access, frame)
        if runs:
            self._finds(access, frame, owner, value)
        self._asks_class(access, frame, owner, value, hop)
        if self._still is not None:
            owner, key, access = self._entry_of(access, frame, owner, key, value, hop)
        if owner is None or hands_on(owner, key):
            sets = access.writes and owner is None and (runs or not frame.is_running)
            self._note_unknown(access, frame, hop, sets=sets)
        for use, held in used_by(access, value, owner, frame):
            if self.lasting.has_all or id(held) in self.lasting.ids:
                self._uses(replace(access, use=use), held, frame, hop)
        if key is UNKNOWN:
            return  # of a function that is not running: it sets an entry by an argument
        self.lasting.add(*frame.kept)  # by a cache
        owner = self.lasting.whose(owner)
        if is_by_microbatch(owner) or is_by_microbatch(value):
            return
        if owner is not None and self.lasting.has(owner):
            if access.is_said:
                self.known.at(owner, key).said_on.add(hop)
            elif access.reads:
                self._reads_all(owner, key, access, frame, hop)
                if self._still is not None and (access.counts or access.use.changes):
                    self.known.at(owner, key).is_changed_beside(hop, frame.line, updates=True)
            if access.writes or makes_entry(owner, key, frame):
                self._will_set([(owner, key, value), *places_of(owner, runs)], access, frame, hop)
        elif access.writes and isinstance(key, str):
            self.known.set_in_new.add(key)
        if access.reads and access.use is not Use.NONE and self._is_content(value, access, owner):
            self._uses(access, self.lasting.whose(value), frame, hop)
            if advances(value):  # in a recording it is a copy of the user's
                self.known.at(value, ALL).held_by = owner, key
        if access.reads and not access.is_said:
            self._note_inside(access, value, owner, frame, hop)

    def _entry_of(
        self, access: Access, frame: Frame, owner: Any, key: Any, value: Any, hop: int
    ) -> tuple[Any, Any, Access]:
        """Return what an access beside the forward is of, as :func:`entry_of` does, and note what
        outlives the forward there, or is left by it."""
        is_there = is_of_module(access.node, frame.code)
        self.lasting.add_beside(owner, value, is_there=is_there)
        inner = entry_of(access, frame, owner, key)
        if inner[0] is not owner and owner is not None and self.lasting.has(owner):
            self._reads(owner, key, frame, hop, counts=False)  # ``self.table.get(key)``
        return inner

    def _note_unknown(self, access: Access, frame: Frame, hop: int, *, sets: bool) -> None:
        """Note that code reads, or sets, something in an object that nobody can tell."""
        name = named_of_unknown(access, frame, self.lasting.has)
        if access.reads and not access.is_said:
            self._reads_any(name, access, frame, hop)
        self.known.is_set_by_name(name if sets else None, hop, frame.line)

    def _finds(self, access: Access, frame: Frame, owner: Any, value: Any) -> None:
        """Note where the forward finds a value, and what it does to it."""
        self._stays = self._stays or effect_of(access, frame, self._used_up, self.lasting.ids)
        self.lasting.taken_in.note(access, frame, owner, value)
        if access.reads and owner is not None:
            self.on_read(owner, value, frame.frame, self.lasting.has(owner))

    def _note_call(self, access: Access, frame: Frame, hop: int) -> None:
        """Note what a function in C reads by names, and the use of what a cache keeps."""
        self.missed.note_norm(access, frame, hop, of_forward=True)
        for owner, key in asked_by_call(access.node, frame):
            if owner is UNKNOWN:
                self._reads_any(key, access, frame, hop)
            elif self.lasting.has(owner) and not access.is_said:
                for holder in owners_of(owner, key):
                    self._reads(holder, key, frame, hop, counts=False)
                    self.known.at(holder, key).is_unnamed = True
        sets = [p for p in set_by_call(access.node, frame) if self.lasting.has(p[0])]
        if self._still is None:
            self.lasting.taken_in.sets(sets)
        if sets:
            self._will_set(sets, access, frame, hop)
        value = frame.given_by(access.node)
        self.lasting.add(*frame.kept)  # by a cache
        if access.use is not Use.NONE and self._is_content(value, access, None):
            self._uses(access, self.lasting.whose(value), frame, hop)
        if not access.is_said:
            self._note_inside(access, value, None, frame, hop)

    def _reads_any(self, name: str | None, access: Access, frame: Frame, hop: int) -> None:
        """Note a read of an object that nobody can tell."""
        for owner in self.known.owners_by_name(name):
            self._reads(owner, name, frame, hop, **read_how(access, frame, self.lasting.has))

    def _asks_class(self, access: Access, frame: Frame, owner: Any, value: Any, hop: int) -> None:
        """Note a read of what an object's class gives it, such as a property, or of the class."""
        found = [(value, "__class__")] if self._replaces_all and access.reads else []
        if isinstance(node := access.node, ast.Attribute) and (owner is None or access.reads):
            found += [] if self.lasting.has(owner) else [(frame.evaluated(node.value), node.attr)]
        for asked, name in found:
            lasts = id(asked) in self.lasting.ids
            for holder in () if is_content(asked) else owners_of(asked, name, lasts=lasts):
                self._reads(holder, name, frame, hop, counts=False)

    def _note_inside(self, access: Access, value: Any, owner: Any, frame: Frame, hop: int) -> None:
        """Note what code reads beside the place that it names."""
        for inner, key in read_inside(access, value, owner, frame):
            if self.lasting.has(inner) and not is_by_microbatch(inner):
                self._reads(inner, key, frame, hop, counts=access.counts)

    def _uses(self, access: Access, value: Any, frame: Frame, hop: int) -> None:
        """Note that a mutable value is read as a whole, or changed."""
        is_given = access.given_to if access.use is Use.READ else None
        if is_given and is_looked_into(function := frame.bound(is_given)):
            return
        is_filled = is_given and changes_given(is_given, function, is_first=access.is_first)
        is_read = access.use is not Use.WRITE and not (is_filled and access.is_dropped)
        key = entry_asked(access, frame)
        if is_read and not access.is_said:
            self._reads(value, key, frame, hop, **read_how(access, frame, self.lasting.has))
            self._may_read_others(value, key, access, frame, hop)
            if is_given and has_memory(value) and shares_memory(function):
                known = self.known.at(value, ALL)  # what autograd saves may change, too
                known.is_read(back(hop), frame.line)
                known.remedy = OF_ARRAY
        is_one = key is not ALL and sets_entry(access, value, is_over=self._still is not None)
        if access.use.changes and is_one:
            self._will_set([(value, key, member_of(value, key))], access, frame, hop)
        elif access.use is not Use.READ or is_filled or advances(value):
            again = self._code.checkpoints.of(frame.frame) is not None
            self.known.is_changed(value, key, hop, frame.line, self._calls(), again=again)
            known = self.known.at(value, key)
            known.begun_on |= {hop: frame.line} if access.method in EMPTIES else {}
            if self._still is not None:
                known.is_changed_beside(hop, frame.line, updates=access.method not in EMPTIES)

    def _is_content(self, value: Any, access: Access, owner: Any) -> bool:
        still = self._still is not None
        return self.lasting.is_content(value, access, owner, self.known, is_still=still)

    def _reads(
        self, owner: Any, key: Any, frame: Frame, hop: int, *, counts: bool, **how: bool
    ) -> None:
        apart = self._apart(frame)
        is_its_own = apart is not None and apart.reads_its_own((space_of(owner), key))
        if is_its_own and self._still is not None:
            return
        self.known.libraries.asked(owner, key, hop, frame.line)
        known = self.known.at(owner, key)
        known.is_found(hop, frame.line)
        known.is_read_outside = known.is_read_outside or self._still is not None
        if counts:
            known.is_counted(hop, frame.line, how)
            return
        known.is_read(hop, frame.line, self._calls(), stores=how.get("stores", False))
        if not is_its_own and self._code.checkpoints.of(frame.frame) is not None:
            known.is_read(back(hop), frame.line)
            known.remedy = OF_CHECKPOINT

    def _reads_all(self, owner: Any, key: Any, access: Access, frame: Frame, hop: int) -> None:
        """Note a read of a place, of its object's class, and what it may be for other sizes."""
        how = read_how(access, frame, self.lasting.has)
        for holder in owners_of(owner, key):
            self._reads(holder, key, frame, hop, **how)
        self._may_read_others(owner, key, access, frame, hop)

    def _may_read_others(
        self, owner: Any, key: Any, access: Access, frame: Frame, hop: int
    ) -> None:
        """Note whether for another size another entry of a dictionary is read."""
        if key is not ALL and self.sizes.choose_entry(access, frame):
            with self.known.for_other_sizes():
                self._reads(owner, ALL, frame, hop, counts=access.counts)

    def _apart(self, frame: Frame) -> ApartRun | None:
        """Return the run apart from the forward that a frame is in."""
        return self._still or self._code.checkpoints.of(frame.frame)

    def _will_set(
        self,
        places: Sequence[tuple[Any, Any, Any]],
        access: Access,
        frame: Frame,
        hop: int,
        *,
        is_fixed: bool = False,
    ) -> None:
        """Note that an instruction sets the values at some places, before it has done so."""
        is_unsure = bool(access.method) or is_optional(access.node, frame.code)
        apart = None if self._still and is_unsure else self._apart(frame)
        again = apart is not None and self._still is None
        lines = hop, frame.line, apart, again, access.counts, self._calls(), is_fixed
        self._pending.begin(places, access, frame, lines)
        for owner, key, _ in places if self._still is not None else ():
            self.known.at(owner, key).is_changed_beside(hop, frame.line, updates=access.counts)

    def _calls(self) -> list[Call | None]:
        return [] if self._still is not None else [self._call()]

    @property
    def outlasting(self) -> frozenset[int]:
        """The objects, by id, that were there before the forward, and variables of functions."""
        cells = {id(c) for fs in self._functions.values() for f in fs for c in f.__closure__ or ()}
        return self.lasting.first | cells

    def way(self, reads: NamesRead, generators: Mapping[int, GeneratorUse]) -> Way | None:
        """Return where the forward has gone, if it was traced."""
        lasting = lasting_in(self.known, self.outlasting)
        found = self.coverage, lasting, reads, generators, self._may_leave
        return Way(*found) if self.traces else None

    @property
    def sets(self) -> dict[int, str]:
        """The objects that were there before and that traced code sets: by id, in words."""
        return self.known.sets(self.outlasting)

    def check(self) -> None:
        """Raise an error if a recording cannot put back what the forward does, or cannot see it."""
        if self._stays is not None:
            self._stays.refuse()
        self._classes.check(self.known.found_at)
