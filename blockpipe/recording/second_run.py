"""A second run of a recorded forward, which shows what the first one's changes lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .entries import SharedChange
from .recording import Recording
from .watching.late.crossed_memory import CrossedMemory


def looked_at_twice(run: Callable[[bool], Recording], crossed: CrossedMemory) -> Recording:
    """Record once, or twice if the forward changes state that several hops see.

    The second run begins with the state that the first one left. So an object that the forward
    makes once and keeps is no error, and neither is one that it empties before it adds to it.

    Args:
        run: records without restoring any state; its argument is true the second time.
        crossed: the memory of what has crossed in the first run.
    """
    first = run(False)
    late_ones = (*first.late_backwards, *first.late_if_packed)
    is_unsure = first.changes_unseen or any(late.settles for late in late_ones) or crossed.stays()
    if not (first.shared_changes or first.collects or first.carried or is_unsure):
        return first
    try:
        second = run(True)
    except Exception:  # the first run may have left a tensor with a gradient path
        for late in first.late_backwards:
            late.compared = late.compared or (late.written if late.settles else None)
        return first
    first.overwrites_outputs = first.overwrites_outputs or crossed.overwrites
    again = {change.what for change in second.shared_changes}
    lasts = (c for c in first.shared_changes if c.settles and _lasts(c, first, second))
    made_once = [c for c in lasts if c.what not in again]
    first.settles = first.settles or bool(made_once)
    first.made_once = made_once
    before = [c for c in first.shared_changes if c not in made_once] + [*crossed.shared()]
    carried = {value.name for value in second.carried}
    first.carried = [value for value in first.carried if value.name in carried]
    first.read_between = [read for read in first.read_between if read[0] in carried]
    left = {change.what for change in first.left_for_loss}
    first.left_for_loss += [c for c in second.left_for_loss if c.what not in left]
    first.read_by_loss |= second.read_by_loss
    first.late_if_packed = second.late_if_packed
    certain = {late.what: late for late in first.late_backwards if not late.settles}
    others = (late for late in second.late_backwards if late.settles or late.what not in certain)
    first.late_backwards = [*certain.values(), *others]
    if first.way is None:
        first.way = second.way
    elif second.way is not None:
        before += _shared_by_turns(first, second, run)
        first.way.add(second.way)
    known = {change.what for change in first.shared_changes}
    first.shared_changes = before + [c for c in second.shared_changes if c.what not in known]
    return first


def _lasts(change: SharedChange, first: Recording, second: Recording) -> bool:
    """Return whether what the second of two runs has not changed stays, whatever the data are. In a
    real run a number may depend on them, and be equal only for the same sample. But if a branch
    alone sets it, which was not taken again, its source tells whether data may lead there."""
    is_skipped = change.place in second.may_set and change.place not in second.assigned
    return first.fake or change.is_traced or is_skipped


def _shared_by_turns(
    first: Recording, second: Recording, run: Callable[[bool], Recording]
) -> Iterator[SharedChange]:
    """Yield what one run sets and the next one reads, where none does both. What the first one
    makes once and for all is no error: a third run would set it again."""
    settled = []
    for change in first.way.shared_with(second.way, replace(second, left_for_loss=[])):
        if change.settles and (first.fake or change.is_traced):
            settled.append(change)
        else:
            yield change
    if settled:
        try:
            third = run(True)
        except Exception:  # as the second one
            return
        again = third.way.shared_with(second.way, replace(second, left_for_loss=[]))
        names = {change.what for change in again}
        yield from (change for change in settled if change.what in names)
