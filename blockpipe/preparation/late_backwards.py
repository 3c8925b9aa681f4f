"""Backwards that a schedule runs later than the plain loop does, where a forward does not bear it.

A recording cannot refuse such a forward: the plain loop's order is that of micro-batches one by
one, and also that of the last stage of 1F1B.
"""

from collections.abc import Iterator

from ..errors import StateError
from ..recording.entries import LateBackward
from ..recording.recording import Recording
from ..schedules.schedule import Schedule


def check_backwards(recording: Recording, schedule: Schedule) -> list[LateBackward]:
    """Check that no backward comes too late, and return those entries of the recording for which
    one does, and only values tell whether that matters.

    Args:
        recording: says what its forward does.
        schedule: of the step, whose lanes run at once.

    Raises:
        StateError: the forward of a later micro-batch would come before such a backward.
    """
    compared = []
    for late in recording.late_backwards:
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
