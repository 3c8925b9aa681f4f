"""Record a forward again after a step whose code went where no recorded forward has been.

A recording reads the source of what it did not run, as far as it can. Where a step's code runs an
instruction that no recording has run on that hop, the very micro-batch is recorded, and judged by
what that run shows.
"""

from __future__ import annotations

import linecache
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import NoReturn

from ..._common.callsite import users_line, warn
from ..._common.coverage.covered_code import Coverage
from ..._common.coverage.uncovered_code import Called, CodeReached, Reached
from ...batches.microbatch import Microbatch
from ...errors import RecordingError, StateError
from ...recording.plain_values.evaluation.still_frames import Given
from ...recording.recording import Recording
from ...restoring.held_signals import RestoredWhole
from ...schedules.builders import ScheduleOption
from ..late_backwards import check_backwards
from ..prepared import Prepared
from ..shared_state import check_changes, opened_since
from ..watched.watched_values import Change
from .ways import check_ways

_log = logging.getLogger(__name__)
_MOST = 16  # recordings for code; a guess
_MOST_GIVEN = 3  # kinds of arguments of a function on a hop; a guess
_SHOWN = 3  # lines, in a warning
_REMEDY = "give Pipeline a sample that takes this way, or use schedule='sequential'"


class SecondPaths:
    """The recordings that are made after steps for code that these have run."""

    def __init__(self) -> None:
        self._left, self._seen = _MOST, set[Reached]()
        self._given = defaultdict[tuple[CodeType, int], set[tuple[int, ...]]](set)

    def look(
        self,
        prepared: Prepared,
        reached: Mapping[int, CodeReached],
        batches: Sequence[Microbatch],
        changed: Sequence[Change],
        schedule: ScheduleOption,
        record: Callable[..., Recording],
    ) -> str:
        """Record the micro-batches of a step whose forwards have run such code.

        Args:
            prepared: what the step ran by.
            reached: the code, by micro-batch.
            batches: the micro-batches.
            changed: what the step has changed.
            schedule: by which it ran.
            record: records one micro-batch, and functions ``beside`` it.

        Returns:
            The lines that no recording of its micro-batch has run, and of which nobody has read
            the source.

        Raises:
            StateError: several hops share what such code sets, reads or draws from.
        """
        if (way := prepared.recording.way) is None:
            return ""
        coverage = way.coverage
        unread = list[Reached]()
        for m in sorted(reached):
            places = [one for one in reached[m] if self._is_new(one, coverage)]
            called = [called for called in reached[m].values() if called is not None]
            beside = [one for one in called if _is_on_one_hop(one, coverage)]
            for undone, read in _ways(changed, m, len(batches), beside):
                if not places:
                    break
                if not self._may_look(places):
                    _give_up(prepared, places)
                    return ""
                _log.info("recorded anew: micro-batch %d ran %s", m, _lines(places))
                with RestoredWhole(*(change.undone() for change in undone)):
                    found = _recorded(record, batches[m], read)
                if found is not None and found.way is not None:
                    _judge(prepared, found, places, schedule, len(batches))
                    here = found.way.coverage
                    for one in places:
                        if one.begins_in(here):
                            here.of(one.code).begun.add((one.hop, one.given))
                    coverage.add(here)
                places = [one for one in places if not one.is_in(coverage)]
            unread += [one for one in places if not _is_read(one, coverage)]
            for one in places:  # no later one comes to it either
                one.add_to(coverage)
        if lines := _lines(unread):
            _doubt(lines)
        return lines

    def _is_new(self, place: Reached, coverage: Coverage) -> bool:
        """Return whether no recording has run a place, nor the same function of some other objects:
        of many experts, or of the statistics of many classes, those that come first are looked at.
        """
        if not place.is_in(coverage) and place.given:
            self._given[place.code, place.hop] |= {place.given}
            if len(self._given[place.code, place.hop]) > _MOST_GIVEN:
                place.add_to(coverage)
        return not place.is_in(coverage)

    def _may_look(self, places: Sequence[Reached]) -> bool:
        """Return whether there is a recording left; what was looked at once needs none, where the
        model was recorded anew."""
        if not self._seen.issuperset(places):
            self._left -= 1
            self._seen.update(places)
        return self._left >= 0


def _recorded(
    record: Callable[..., Recording], batch: Microbatch, beside: Sequence[Called] | None
) -> Recording | None:
    """Return a recording; ``None`` if the forward does not run once more, as one that makes a file
    which is there by now."""
    try:
        if beside is None:
            return record(batch)
        given = [(called.function, Given(named=called.given), called.hop) for called in beside]
        return record(batch, beside=given, fakes=False)
    except RecordingError as error:
        _log.info("which it does not do once more: %s", error)
        return None


def _doubt(lines: str) -> None:
    warn(
        f"the forward has run {lines}, which it did not when it was recorded, and does not when "
        "the same micro-batch is recorded again: whether that reads what another stage sets is not "
        "known, and this step's gradients may not be the plain loop's; from now on micro-batches "
        f"run one by one; {_REMEDY} ({users_line()})"
    )


def _give_up(prepared: Prepared, places: Sequence[Reached]) -> None:
    prepared.recording.way = None  # nobody looks any more
    warn(
        f"the forward has run {_lines(places)}, which it did not when it was recorded, as other "
        f"code in {_MOST} micro-batches before: from now on, nobody looks whether such code reads "
        f"what another stage sets; {_REMEDY} ({users_line()})"
    )


def _judge(
    prepared: Prepared,
    found: Recording,
    places: Sequence[Reached],
    schedule: ScheduleOption,
    microbatches: int,
) -> None:
    """Check a forward that goes where the recorded one did not.

    Raises:
        StateError: micro-batches under way at once would not be the plain loop's.
    """
    known = prepared.recording
    names = {late.what for late in known.late_backwards}
    late = [one for one in found.late_backwards if one.what not in names]
    try:
        check_ways(known, found, schedule)
        # What a first step makes before others need it, this one has made among them.
        check_changes(() if known.settles else found.made_once)
        check_backwards(late, prepared.schedule(schedule, microbatches))
        if (call := opened_since(known, found)) is not None:
            raise StateError(
                f"{call.path!r} has run sealed, and would have to be looked into on this way: "
                f"{call.opened}; {_REMEDY}"
            )
        _check_recomputed(prepared, found)
    except StateError as error:
        _refuse(places, error)
    known.late_backwards += late


def _check_recomputed(prepared: Prepared, found: Recording) -> None:
    """Check that recomputation does the same once more, on a way that the recorded forward has not
    gone. What that leaves for the next forward is compared by steps from then on.

    Raises:
        StateError: it does not.
    """
    known = prepared.recording
    names, places = ({getattr(v, n) for v in known.carried} for n in ("name", "place"))
    known.carried += [value for value in found.carried if value.name not in names]
    if not prepared.does_recompute or found.way is None or known.way is None:
        return
    ways = [known.way, *(one.way for one in known.way.others if one is not found)]
    asks = any("is_recomputing" in one.code.co_names for one in found.way.coverage)
    for line in () if asks else found.way.set_for_later(ways, places):
        raise StateError(
            f"the forward leaves something for the next one ({line}), and recomputation may set it "
            "once more: ask blockpipe.is_recomputing() before it is set, or mark the module with "
            "checkpoint=False"
        )


def _refuse(places: Sequence[Reached], error: StateError) -> NoReturn:
    raise StateError(
        f"the forward has run {_lines(places)}, which it did not when it was recorded, and this "
        f"step's gradients may not be the plain loop's: {error} ({users_line()})"
    ) from None


def _is_on_one_hop(called: Called, coverage: Coverage) -> bool:
    """Return whether a function may be read as code of the hop that it has begun on."""
    covered = coverage.found(called.function.__code__)
    return covered is None or covered.stays_on(called.hop)


def _ways(
    changed: Sequence[Change], m: int, of: int, beside: list[Called]
) -> Iterator[tuple[list[Change], list[Called] | None]]:
    """Yield what to undo, so that a forward may go the way of a step's micro-batch. If it does not,
    functions come with it, to be looked at, and it runs on no fake tensors, by which it may turn.

    Args:
        changed: what the step has changed.
        m: the micro-batch.
        of: their number.
        beside: the functions.
    """
    # Numbers that have grown evenly are what they were then.
    undone = [change for each in changed if (change := _as_then(each, m, of)) is not None]
    yield undone, None
    yield [], beside


def _as_then(change: Change, m: int, of: int) -> Change | None:
    then, now = change.then, change.now()
    if type(then) in (int, float) and type(now) is type(then):
        return replace(change, then=type(then)(then + (now - then) * m / of))
    return change if m == 0 else None


def _is_read(place: Reached, coverage: Coverage) -> bool:
    """Return whether the source was read of what has run: a function that was not entered, or the
    branches that another one did not take."""
    if _has_no_source(place):
        return False
    covered = coverage.found(place.code)
    return place.code in coverage.read or (covered is not None and bool(covered.ran))


def _has_no_source(place: Reached) -> bool:
    """Return whether no recording can tell what a code reads (``exec``); the methods that Python
    writes for a class read its own objects."""
    code = place.code
    is_written = code.co_name.startswith("__")
    return not is_written and not linecache.getline(code.co_filename, code.co_firstlineno)


def _lines(places: Sequence[Reached]) -> str:
    lines = [*dict.fromkeys(one.where for one in places)]
    return ", ".join(lines[:_SHOWN]) + (" and more" if len(lines) > _SHOWN else "")
