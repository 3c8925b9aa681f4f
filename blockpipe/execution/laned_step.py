"""A step on lanes: a thread for each, in the order of a schedule."""

from contextlib import nullcontext
from typing import Literal

from .._common.threads.shared_contexts import SharedContexts
from .._torch.graph import saved_tensor_hooks
from ..devices.devices import is_asynchronous
from ..restoring.process_state import kept_process_state
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from .lanes.lane_threads import LaneThreads
from .lanes.thread_pool import threads_of_a_lane
from .microbatch.backward import MicrobatchBackward
from .microbatch.backward_writes import BackwardWrites
from .microbatch.forward import MicrobatchForward
from .step_state import StepState

_NOTHING = nullcontext()


class LanedStep:
    """Plays a schedule over the micro-batches of a step.

    Args:
        state: of the step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._prepared = state.request.prepared
        self._forward = MicrobatchForward(state)
        self._backward = MicrobatchBackward(state)
        state.request.caller.for_threads()

    def run(self, option: ScheduleOption, only: Literal["F", "B"] | None = None) -> None:
        """Run all actions of a schedule.

        Args:
            option: asks for the schedule.
            only: the forwards alone, or all but them.
        """
        request, prepared = self._state.request, self._prepared
        schedule = prepared.schedule(option, len(request.microbatches))
        # Hooks on what is saved would unpack it once for each part of a backward.
        packs = saved_tensor_hooks() is not None
        is_first = only is None and not prepared.knows_backwards
        if is_first or (only is None and prepared.runs_code_in_backwards):
            self._backward.writes = BackwardWrites(prepared, schedule, is_first=is_first)
        self._backward.split = schedule.split() if only is None and not packs else set()
        threads = LaneThreads(
            schedule,
            self._forward.run,
            self._backward.run,
            request.caller,
            queued=self._queued(schedule),
            threads=threads_of_a_lane(
                len(schedule.lanes), is_asynchronous=prepared.is_asynchronous
            ),
            only=only,
        )
        if request.observer is not None:
            request.observer.plays(schedule)
        before = None if only == "B" else prepared.unwritten.states()
        keeps = kept_process_state() if prepared.recording.changes_process else _NOTHING
        with keeps, SharedContexts():
            threads.run()
        prepared.knows_backwards |= is_first and len(request.microbatches) > 1
        if before is not None:
            self._state.written = prepared.unwritten.written(before)

    def _queued(self, schedule: Schedule) -> list[bool]:
        """For each lane, whether its device is asynchronous."""
        queued = [False] * len(schedule.lanes)
        for hop, lane in enumerate(schedule.lane_of_hop):
            queued[lane] |= is_asynchronous(self._prepared.devices[self._prepared.route[hop]])
        return queued
