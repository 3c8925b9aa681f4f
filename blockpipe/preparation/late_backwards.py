"""Backwards that a schedule runs later than the plain loop does, where a forward does not bear it.

A recording cannot refuse such a forward: the plain loop's order is that of micro-batches one by
one, and also that of the last stage of 1F1B.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._common.nested import tensors
from .._torch.tensors import memory_of
from ..errors import StateError
from ..recording.entries import LateBackward
from ..schedules.schedule import Schedule


def check_backwards(entries: Iterable[LateBackward], schedule: Schedule) -> list[LateBackward]:
    """Check that no backward comes too late, and return those entries of a recording for which one
    does, and only values tell whether that matters.

    Args:
        entries: say what its forward does.
        schedule: of the step, whose lanes run at once.

    Raises:
        StateError: the forward of a later micro-batch would come before such a backward.
    """
    compared = []
    for late in entries:
        for earlier, later in _late(schedule, late):
            if late.compared is not None:
                compared.append(late)
            else:
                raise StateError(
                    f"{late.what}, and the backward of an earlier micro-batch {late.needs}: "
                    f"schedule {schedule.name!r} runs the forward of micro-batch {later} before "
                    f"the backward of micro-batch {earlier}; {late.remedy}, or use "
                    "schedule='sequential'"
                )
            break
    return compared


def hidden_by(
    pack: Callable[[Tensor], Any], entries: Iterable[LateBackward], devices: Sequence[torch.device]
) -> Iterator[LateBackward]:
    """Yield what autograd does not notice where hooks are around a step: they keep the memory that
    autograd would have saved, and it compares no versions.

    Args:
        pack: the hook that is given what autograd saves.
        entries: of a recording, what it notices without hooks.
        devices: of each hop.
    """
    for late in entries:
        shape, dtype = late.sample or ((), None)
        with torch.no_grad():
            probe = torch.zeros(shape, dtype=dtype, device=devices[late.hop])
            kept = [*tensors(pack(probe))]
        if memory_of(probe) in map(memory_of, kept):
            yield late


def _late(schedule: Schedule, late: LateBackward) -> Iterator[tuple[int, int]]:
    """Yield an earlier micro-batch and a later one, of which the forward comes first."""
    for hop in late.backwards:
        # Its backward is the last one of the two, and its forward the first.
        first, latest = min(hop, late.hop), -1
        lane, other = (schedule.lanes[schedule.lane_of_hop[each]] for each in (first, hop))
        ends_apart = lane is not other and any(action.kind == "W" for action in other)
        if ends_apart and schedule.microbatches > 1:
            yield 0, 1  # nothing waits for the end of a backward in two parts
        for action in lane:
            if action.kind == "F" and action.hop == first:
                latest = max(latest, action.microbatch)
            elif action.kind in "BW" and action.hop in (first, hop) and action.microbatch < latest:
                yield action.microbatch, action.microbatch + 1
