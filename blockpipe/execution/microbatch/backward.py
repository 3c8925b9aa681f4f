"""One backward action of one micro-batch: recomputation, a hop's backward, or its second part."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from ...crossing.microbatch_run import MicrobatchRun
from ...devices.rng_streams import own_turn
from ...devices.sanitizer import Sanitizer
from ...recording.plain_values.values import back
from ...schedules.schedule import Action
from ...stages.cursor import Cursor, set_cursor
from ..lanes.lane_threads import Abandoned
from ..step_state import StepState
from .backward_writes import BackwardWrites
from .failure_notes import named_arguments, note_failure

_NOTHING = nullcontext()


class MicrobatchBackward:
    """Runs the backward actions of one step, each in the thread that asks for it.

    Args:
        state: of the step, whose forwards have run.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._hops = state.request.prepared.recording.hops
        self._splits = state.request.prepared.recording.splits_backward
        self._isolate_as = state.request.isolate_as
        self._observer = state.request.observer
        self.split: set[tuple[int, int]] = set()
        """The (hop, micro-batch) pairs whose backward is in two parts."""
        self.writes: BackwardWrites | None = None
        """Looks at what they write, in the first step."""

    def run(self, action: Action) -> None:
        """Run one action that is no forward."""
        hop = self._hops[action.hop]
        stage = hop.stage
        phase = "recomputation" if action.kind == "R" else "backward"
        cursor = Cursor()
        cursor.stage = stage
        cursor.uses = self._state.uses if action.kind == "R" else self._state.late_uses
        outer = set_cursor(cursor)  # for hooks of the user's: which stage is this?
        try:
            self._state.be_on(stage)
            # torch.utils.checkpoint sets the generators before it runs a part again, and after,
            # also where that part does not draw.
            takes_turn = hop.reruns_forward and self._state.randomness.any_draws
            if self._isolate_as is None and not takes_turn:
                self._run(action, stage)
                return
            with ExitStack() as stack:
                if takes_turn:
                    stack.enter_context(own_turn())
                if self._isolate_as is not None:
                    stack.enter_context(
                        Sanitizer(self._isolate_as, action.microbatch, stage, phase)
                    )
                self._run(action, stage)
        except Abandoned:
            raise
        except BaseException as error:
            note_failure(
                error, phase, action.microbatch, stage, self._overwritten(action.microbatch)
            )
            raise
        finally:
            set_cursor(outer)

    def _overwritten(self, m: int) -> str:
        """The arguments of a micro-batch that the caller has written to since its forward."""
        return named_arguments(
            self._state.request.microbatches[m], self._state.runs[m].slices.written
        )

    def _run(self, action: Action, stage: int) -> None:
        kind, hop, m = action
        run: MicrobatchRun = self._state.runs[m]
        if self._observer is not None:
            self._observer.begins(kind, hop, stage, m)
        if kind == "R":
            run.restore(hop)
        else:
            if kind == "B" and self._state.kept is not None:
                self._state.kept.needed(hop, m)
            checked = _NOTHING if self.writes is None else self.writes.checked(action)
            with checked, self._noting(action, stage):
                self._run_back(action, run)
        if self._observer is not None:
            self._observer.ends(kind, hop, m)

    def _noting(self, action: Action, stage: int) -> AbstractContextManager[None]:
        """Note what autograd calls of the user's and nobody has read."""
        if self._state.uncovered is None:
            return _NOTHING
        device = self._state.request.prepared.devices[stage]
        return self._state.uncovered.noting_backward(action.microbatch, back(action.hop), device)

    def _run_back(self, action: Action, run: MicrobatchRun) -> None:
        kind, hop, m = action
        if kind == "W":
            run.finish_backward(hop)
        elif not self.split:
            run.backward(hop)
        else:
            split = (hop, m) in self.split and self._splits[hop]
            run.backward(hop, split=split, before_whole=partial(self._finish_earlier, hop, m))

    def _finish_earlier(self, hop: int, m: int) -> None:
        """Compute the parameters' gradients of earlier micro-batches: ``.grad`` adds up in their
        order, also where only this one's backward cannot be split."""
        for earlier in range(m):
            self._state.runs[earlier].finish_backward(hop)
