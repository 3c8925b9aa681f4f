"""A step in the caller's own thread: each micro-batch goes out and comes back before the next."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from .._common.threads.thread_state import intra_operation_threads
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Action
from .lanes.thread_pool import threads_of_a_lane
from .microbatch.backward import MicrobatchBackward
from .microbatch.forward import MicrobatchForward
from .step_state import StepState

_NOTHING = nullcontext()


class InlineStep:
    """Runs the micro-batches of a step one by one.

    Args:
        state: of the step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._prepared = state.request.prepared
        self._caller = state.request.caller
        self._forward = MicrobatchForward(state)
        self._backward = MicrobatchBackward(state)

    def run(self, schedule: ScheduleOption, only: Literal["F", "B"] | None = None) -> None:
        """Run each micro-batch's forward and backward.

        Args:
            schedule: the one that later steps have, where this one only compiles.
            only: the forwards alone, or the backwards alone.
        """
        needs_grad_mode = only == "B"  # the caller's backward() has none
        with self._threads(schedule), torch.enable_grad() if needs_grad_mode else _NOTHING:
            for m in range(len(self._state.request.microbatches)):
                if only != "B":
                    self._run_forward(m)
                if only != "F":
                    self._run_backward(m)

    def _run_forward(self, m: int) -> None:
        with self._caller.uncached_autocast() if self._caller.autocasts else _NOTHING:
            self._forward.run(m)

    def _run_backward(self, m: int) -> None:
        with self._caller.no_autocast() if self._caller.autocasts else _NOTHING:
            for hop in reversed(range(len(self._prepared.route))):
                if self._prepared.does_recompute:
                    self._backward.run(Action("R", hop, m))
                self._backward.run(Action("B", hop, m))

    def _threads(self, option: ScheduleOption) -> AbstractContextManager[None]:
        """As many threads for an operation as on a lane, if the step is in one thread only because
        it compiles: code that is compiled for one number of threads is compiled anew for another.
        """
        state = self._state
        if state.mode.one_by_one:
            return _NOTHING
        lanes = len(self._prepared.schedule(option, len(state.request.microbatches)).lanes)
        count = threads_of_a_lane(lanes, is_asynchronous=self._prepared.is_asynchronous)
        return intra_operation_threads(count)
