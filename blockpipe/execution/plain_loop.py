"""A step as the plain loop has it: the model is called, and its loss's backward runs.

Where everything is in one thread and on one device, cutting the graph would gain nothing.
Operations are not intercepted, and there is one backward for all stages.
"""

from contextlib import nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor

from .._common.callsite import users_line
from .._common.nested import leaves, map_tensors, tensors
from .._common.threads.thread_state import theirs
from ..batches.losses import check_differentiable, checked_loss
from ..batches.shared_memory import map_sharing
from ..crossing.hop_backward import run_engine
from ..crossing.microbatch_run import detached
from ..devices.devices import is_asynchronous
from ..errors import RouteError
from ..stages.cursor import (
    SKIPPED_MARKS,
    Cursor,
    Mark,
    current_cursor,
    current_microbatch,
    set_cursor,
    set_microbatch,
)
from .microbatch.failure_notes import note_failure
from .microbatch.observed import PlainLoopObserver
from .microbatch.outputs import apart
from .step_state import MicrobatchResult, StepState

_NOTHING = nullcontext()


class PlainLoop:
    """Runs each micro-batch forward and back.

    Args:
        state: of the step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._request = state.request
        self._prepared = state.request.prepared
        self._first_stage = self._prepared.route[0]
        self._is_asynchronous = is_asynchronous(self._prepared.devices[self._first_stage])
        self._autocasts = state.request.caller.autocasts
        self._outer = current_microbatch()

    def run(self) -> None:
        """Run all micro-batches."""
        before = current_cursor()
        try:
            for m in range(len(self._request.microbatches)):
                self._run_microbatch(m)
        finally:
            set_cursor(before)
            set_microbatch(self._outer)

    def _run_microbatch(self, m: int) -> None:
        state, prepared = self._state, self._prepared
        follow_marks = not prepared.planned
        cursor = (
            _FixedCursor(self._first_stage, m, follow_marks=follow_marks)
            if prepared.is_one_hop
            else Cursor(follow_marks=follow_marks)
        )
        set_cursor(cursor)
        set_microbatch(m)
        observer = None
        if self._request.observer is not None:
            observer = PlainLoopObserver(self._request.observer, prepared.route, cursor, m)
        phase = "forward"
        try:
            loss = self._forward(m)
            if observer is not None:
                observer.turn_back()
            phase = "backward"
            set_microbatch(self._outer)  # its forward is over: recomputation is no other one
            self._backward(m, loss)
            if observer is not None:
                observer.finish()
        except BaseException as error:
            is_known = phase == "forward" or prepared.is_one_hop
            note_failure(error, phase, m, cursor.stage if is_known else None)
            raise
        finally:
            state.randomness.leave(m, 0)

    def _forward(self, m: int) -> Tensor:
        """Run the model and its loss; the result is in the step's state."""
        state, caller, batch = self._state, self._request.caller, self._request.microbatches[m]
        state.randomness.enter(m, state.randomness.all_sources)
        if self._is_asynchronous:
            state.be_on(self._first_stage)
        args, kwargs, target = self._moved(m, (batch.args, batch.kwargs, batch.target))
        taken = state.whole_arguments.taken(batch, args, kwargs)
        moved = () if self._inputs_are_there else (args, kwargs)
        versions = state.shared_arguments.versions(batch, moved)
        with caller.uncached_autocast() if self._autocasts else _NOTHING, theirs():
            output = self._prepared.model(*args, **kwargs)
            loss = state.randomness.loss(output, target)
        loss = checked_loss(loss)
        state.whole_arguments.check(taken)
        state.shared_arguments.check(batch, versions)
        state.randomness.leave(m, 0)
        check_differentiable(loss)
        result = state.results[m] = MicrobatchResult(loss.detach().clone())
        if "outputs" in self._request.want:
            overwritten = self._prepared.recording.overwrites_outputs
            result.outputs = apart(detached(output), batch.size, overwritten=overwritten)
            result.on_host = [
                self._is_asynchronous and isinstance(leaf, Tensor) and leaf.device.type == "cpu"
                for leaf in leaves(output)
            ]
        return loss

    def _backward(self, m: int, loss: Tensor) -> None:
        if not self._request.weights[m]:
            return  # it adds nothing, but 0 * NaN would be NaN
        with self._request.caller.no_autocast() if self._autocasts else _NOTHING:
            # As loss.backward(root) does, when it has looked at its arguments.
            roots = (loss,), (self._state.root(m, loss),)
            run_engine(*roots, False, False, (), True, True)

    def _moved(self, m: int, given: Any) -> Any:
        """A micro-batch's arguments and target on the device of the first stage."""
        if self._inputs_are_there:
            return given
        writes = self._prepared.recording.writes_inputs
        return (map_sharing if writes else map_tensors)(
            lambda tensor: self._state.context.carried(
                tensor, self._first_stage, self._state.watch(tensor, 0, m)
            ),
            given,
        )

    @cached_property
    def _inputs_are_there(self) -> bool:
        """Whether no input has to be moved to the first stage's device."""
        device = self._prepared.devices[self._first_stage]
        batch = self._request.microbatches[0]
        return all(t.device == device for t in tensors((batch.args, batch.kwargs, batch.target)))


class _FixedCursor(Cursor):
    """The cursor where the recording saw nothing move it."""

    def __init__(self, stage: int, microbatch: int, *, follow_marks: bool) -> None:
        super().__init__(follow_marks=follow_marks)
        self.stage = stage
        self.microbatch = microbatch

    def move(self, stage: int, mark: Mark | None) -> None:
        if stage != self.stage:
            raise RouteError(
                f"micro-batch {self.microbatch} goes to stage {stage}, but the recorded route is "
                f"[{self.stage}] ({users_line()}); give Pipeline a sample that takes this way; "
                f"{SKIPPED_MARKS}"
            )
