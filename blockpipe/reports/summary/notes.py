"""The notes below a summary: what a recording shows that users may not expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..._common.text import short

if TYPE_CHECKING:  # a recording can summarize itself; that needs only its fields
    from ...recording.recording import Recording

_MOST_NAMES = 3  # of parameters that no call reads


def notes_on(recording: Recording) -> Iterator[str]:
    """Iterate over the notes on a recording."""
    has_several_stages = recording.num_stages > 1
    if has_several_stages:
        yield from _on_unmarked(recording)
    yield from _on_parameters(recording)
    yield from recording.unreached
    if not has_several_stages:
        yield f"{_why_one_stage(recording)}: everything is on stage {recording.route[0]}"
    yield from _on_route(recording)
    if has_several_stages:
        for sync in recording.host_syncs:
            yield f"on an accelerator the host waits at {short(sync.where)}: {sync.operation}"
    yield from _on_how_it_was_recorded(recording)


def _on_unmarked(recording: Recording) -> Iterator[str]:
    for unmarked in recording.unmarked:
        after = (
            "before the first mark"
            if unmarked.after is None
            else f"after the block at {short(unmarked.after)} ended"
        )
        count = unmarked.operations
        operations, verb = ("operation", "is") if count == 1 else ("operations", "are")
        where = short(unmarked.where)
        yield f"{count} {operations} {after} {verb} on stage {unmarked.stage} (from {where})"


def _on_parameters(recording: Recording) -> Iterator[str]:
    for info in recording.tied:
        also = f", read on {info.also_read_on} too" if info.also_read_on else ""
        yield f"tied: {' = '.join(info.names)} lives on stage {info.stage}{also}"
    for info in recording.shared_state:
        kind = "buffer" if info.is_buffer else "parameter"
        yield f"{kind} {info.name} is written, and read on several hops: {info.hops}"
    for shared in recording.shared_changes:
        yield f"the forward changes {shared.what}, and {shared.seen} on hops {shared.hops}"
    for late in recording.late_backwards:
        yield f"{late.what}, and the backward of an earlier micro-batch {late.needs}"
    for what, where in {value.name: value.where for value in recording.carried}.items():
        yield (
            f"each forward changes {what}, and the next one reads it ({short(where)}): "
            "micro-batches count as forwards, so the numbers depend on how many there are in a step"
        )
    if recording.given_at:
        where = short(recording.given_at)
        yield f"steps run in one thread: the next one may use another number at {where}"
    if recording.written_late:
        yield f"steps run in one thread: one has written {recording.written_late}"
    unused = [info.name for info in recording.unused]
    if unused:
        left = len(unused) - _MOST_NAMES
        more = f" and {left} more" if left > 0 else ""
        yield f"no call reads {', '.join(unused[:_MOST_NAMES])}{more}"


def _why_one_stage(recording: Recording) -> str:
    if recording.planned:
        return "the plan has one stage"
    if recording.marks or recording.unreached:
        return "no mark that is reached begins another stage"
    return "nothing is marked"


def _on_route(recording: Recording) -> Iterator[str]:
    if len(recording.route) > recording.num_stages:
        yield f"the route returns to a stage: {recording.route}"
    for hop in recording.hops[1:]:  # no hop waits for the first one's gradients: nothing to gain
        if hop.whole:
            yield f"zero-bubble schedules leave hop {hop.index}'s backward whole: {hop.whole}"


def _on_how_it_was_recorded(recording: Recording) -> Iterator[str]:
    if "" in recording.unhookable:
        yield (
            "the tensors that autograd saves are not known, and nothing can be recomputed: the "
            "forward's own code uses torch.func; put it into a module"
        )
    if recording.why_elsewhere:
        yield (
            "recorded where the model is, and not on fakes of the stages' devices, whose kernels "
            f"may keep other tensors: {recording.why_elsewhere}"
        )
    if recording.why_real:
        yield f"recorded by a real run: {recording.why_real}"
