"""One step: the forwards and backwards of some micro-batches.

.. code-block:: text

    Step.run                    around the step: stand-ins for modules, random streams, clean-up
      PlainLoop.run             nothing crosses: the model is called, and loss.backward
      InlineStep.run            one thread: each micro-batch goes out and comes back
      LanedStep.run             a thread for each lane, in the order of a schedule
        MicrobatchForward.run   the user's forward, intercepted; it waits at each border
        MicrobatchBackward.run  one hop's backward

:mod:`~blockpipe.execution.step_mode` decides between the three. ``pipe(x)`` runs the forwards and
the backwards apart (:meth:`Step.run_forward`, :meth:`Step.run_backward`), never as the plain loop:
its graph is cut for the caller's one backward.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from .._torch.graph import saved_tensor_hooks
from ..devices.digests import Comparisons
from ..preparation.late_backwards import check_backwards, hidden_by
from ..preparation.watched.watched_values import WatchedValues
from ..schedules.builders import ScheduleOption
from .inline_step import InlineStep
from .laned_step import LanedStep
from .microbatch.kept_values import KeptValues
from .microbatch.recomputed_model import RecomputedModel
from .plain_loop import PlainLoop
from .step_mode import reason_of
from .step_request import StepRequest
from .step_state import StepState
from .surroundings import around_cut_step, around_plain_loop

_log = logging.getLogger(__name__)


class Step:
    """One step over some micro-batches.

    Args:
        request: what it is asked to do.
    """

    def __init__(self, request: StepRequest) -> None:
        self.request = request
        self.state = StepState(request)
        self._model: RecomputedModel | None = None
        request.prepared.microbatches = len(request.microbatches)
        if self.state.mode.unsettled is not None:
            request.prepared.step_sizes.latest = frozenset()  # until it is over
        if request.prepared.steps == 0:
            reason = reason_of(self.state.mode, request)
            _log.info("%d micro-batches %s", len(request.microbatches), reason)

    @cached_property
    def _runner(self) -> InlineStep | LanedStep:
        """Runs what the plain loop cannot. It reads the caller's thread when it is made."""
        return InlineStep(self.state) if self.state.mode.in_one_thread else LanedStep(self.state)

    def run(self) -> None:
        """Run all forwards and backwards."""
        if self.state.mode.is_plain_loop:
            with around_plain_loop(self.state), self.state.randomness.drawing():
                try:
                    PlainLoop(self.state).run()
                finally:
                    self.state.context.settle()
            self._has_settled()
        else:
            runner = self._runner  # before anything is put around the step
            if not self.state.mode.in_one_thread:
                self._check_backwards(self.request.schedule)
            with (
                around_cut_step(self.state),
                self._cleaned_up(),
                self.state.randomness.drawing(),
            ):
                runner.run(self.request.schedule)
                self._check_results()
        self.request.prepared.steps += 1
        self._has_compared()

    def run_forward(self) -> None:
        """Run all forwards; their graphs stay, for a backward that the caller starts."""
        runner = self._runner
        if self.request.schedule not in ("sequential", "uncut"):
            self._check_backwards("gpipe")
        with (
            around_cut_step(self.state),
            self._cleaned_up(only_on_failure=True),
            self.state.randomness.drawing(),
        ):
            runner.run("gpipe", "F")
            self._settle()
        self.request.prepared.steps += 1

    def remember(self, values: WatchedValues) -> None:
        """Have the backward check that it finds the model as it is now.

        Args:
            values: the plain values that forwards read.
        """
        prepared, count = self.request.prepared, len(self.request.microbatches)
        if prepared.does_recompute and self.state.context.graphs.differentiable:
            self._model = RecomputedModel(self.request.model, prepared, count, values)

    def run_backward(self) -> None:
        """Run all backwards, after roots were added to the runs."""
        with around_cut_step(self.state), self._cleaned_up():
            if self._model is not None:
                self._model.check()
            self._runner.run("gpipe", "B")
            self._check_results()
        self._has_compared()

    def _has_compared(self) -> None:
        """Note that first steps have been looked at: one micro-batch says nothing of two."""
        differentiable = self.state.context.graphs.differentiable
        self.request.prepared.has_compared |= differentiable and len(self.request.microbatches) > 1

    def _check_backwards(self, option: ScheduleOption) -> None:
        """Check that the forwards bear the order of the backwards, or have the step look."""
        prepared, context = self.request.prepared, self.state.context
        recording = prepared.recording
        is_any = recording.late_backwards or recording.late_if_packed
        if not is_any or not context.graphs.differentiable:
            return
        entries, around = [*recording.late_backwards], saved_tensor_hooks()
        if around is not None:
            devices = [prepared.devices[stage] for stage in prepared.route]
            entries += hidden_by(around[0], recording.late_if_packed, devices)
        schedule = prepared.schedule(option, len(self.request.microbatches))
        late = check_backwards(entries, schedule)
        if late:  # a later step may write other values
            self.state.kept = KeptValues(prepared, late, context.comparisons or Comparisons())

    def _check_results(self) -> None:
        """Raise an error if a constant was written to after others had read it, if a backward has
        found other values than its forward left, or if recomputed tensors of a first step are not
        those that were saved."""
        self._settle()
        if self.state.kept is not None:
            self.state.kept.conclude()
        if self.state.context.comparisons is not None:
            self.state.context.comparisons.conclude()

    def _settle(self) -> None:
        """Check the tables that the forwards have made and kept, which later steps will read."""
        if self.state.context.constants is not None:
            self.state.context.constants.check()
        self._has_settled()

    def _has_settled(self) -> None:
        """Note the sizes that what the forwards have left follows from."""
        if self.state.mode.unsettled is not None:
            self.request.prepared.step_sizes.latest = self.state.mode.unsettled

    @contextmanager
    def _cleaned_up(self, *, only_on_failure: bool = False) -> Iterator[None]:
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self.state.clean_up(keeps_graphs=only_on_failure and not has_failed)
