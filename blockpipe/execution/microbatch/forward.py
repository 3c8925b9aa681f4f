"""The forward of one micro-batch: arguments in, the user's code under interception, its loss, and a
result without a graph."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..._common.nested import leaves, map_tensors, tensors
from ..._common.threads.thread_state import theirs
from ..._torch.tensors import storage_id
from ...batches.losses import check_differentiable, checked_loss
from ...batches.microbatch import Microbatch
from ...crossing.interception import CrossingMode
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.offload import Offload
from ...crossing.tags import TAG, Tag, edge_of
from ...crossing.tensors.place import Reads
from ...crossing.uncut_run import UncutRun
from ...devices.sanitizer import Sanitizer
from ...errors import not_caught
from ...stages.cursor import Cursor, set_cursor, set_microbatch
from ..lanes.lane_threads import Abandoned, Cross
from ..step_state import MicrobatchResult, StepState
from .arguments import MicrobatchArguments
from .failure_notes import note_failure
from .observed import observed_border
from .outputs import apart

_NOTHING = nullcontext()


class MicrobatchForward:
    """Runs the forwards of one step's micro-batches, each in the thread that asks for it.

    Args:
        state: of the step.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._request = state.request
        self._prepared = state.request.prepared
        self._arguments = MicrobatchArguments(state)
        self._observer = state.request.observer

    def run(self, m: int, cross: Cross | None = None) -> None:
        """Run a micro-batch's forward; its result and its graphs are in the step's state.

        Args:
            m: the micro-batch.
            cross: waits for the micro-batch's turn at each border; ``None``: it need not wait.
        """
        request, state = self._request, self._state
        cursor = Cursor(follow_marks=not self._prepared.planned)
        cursor.uses = state.uses
        kind = MicrobatchRun if request.is_cut else UncutRun
        run = state.runs[m] = kind(state.context, m, cursor)
        run.recomputes = self._prepared.recomputes(m, len(request.microbatches))
        before, outer = set_cursor(cursor), set_microbatch(m)
        try:
            sanitizer = None
            if request.isolate_as is not None:
                sanitizer = Sanitizer(request.isolate_as, m, self._prepared.route[0], "forward")
            run.on_border = self._border(run, cross, sanitizer)
            if self._observer is not None:
                run.on_border = observed_border(run, run.on_border, self._observer)
            with sanitizer if sanitizer is not None else _NOTHING:
                state.results[m] = self._run_model(run, request.microbatches[m])
            state.left(run.hop, m)
            if self._observer is not None:
                self._observer.ends("F", run.hop, m)
        except Abandoned:
            raise
        except BaseException as error:
            note_failure(error, "forward", m, max(run.stage, 0))
            raise
        finally:
            set_cursor(before)
            set_microbatch(outer)
            try:
                state.randomness.leave(m, run.hop)
            finally:
                run.finish_forward()

    def _border(
        self, run: MicrobatchRun, cross: Cross | None, sanitizer: Sanitizer | None
    ) -> Callable[[int, int], None]:
        """What a run does between two hops: let others draw and run, then be on the next stage."""
        randomness, m = self._state.randomness, run.microbatch

        def border(before: int, after: int) -> None:
            self._state.left(before, m)
            randomness.leave(m, before)
            if cross is not None:
                cross(m, before, after)
            stage = run.stage
            self._state.be_on(stage)
            randomness.enter_hop(m, after)
            if sanitizer is not None:
                sanitizer.stage = stage

        return border

    def _run_model(self, run: MicrobatchRun, batch: Microbatch) -> MicrobatchResult:
        """Take the arguments to the stages, run the model, and its loss if it is asked for."""
        args, kwargs, target = self._arguments.take(run, batch)
        taken = self._state.whole_arguments.taken(batch, args, kwargs)
        versions = self._state.shared_arguments.versions(batch, (args, kwargs))
        with self._offloading(run):
            if self._draws_at_once:
                # Before the first operation: code that keeps the generator's state for later
                # (torch.utils.checkpoint) reads it before that.
                run.arrive()
            with not_caught(), theirs(), CrossingMode(run), self._noting(run):
                output = self._prepared.model(*args, **kwargs)
            if run.hop < 0:
                run.arrive()
            # The loss is computed where the forward's last operation was: an inner block may have
            # ended since, and its end moved the cursor.
            run.cursor.stage = run.stage
            loss = None
            if "loss" in self._request.want:
                target = self._arguments.received(run, batch, target)
                noting = self._noting(run, is_loss=True)
                with not_caught(), theirs(), CrossingMode(run), noting:
                    loss = self._state.randomness.loss(output, target)
                loss = checked_loss(loss)
        run.cursor.uses = None  # what is read from here on, no code of the user's reads
        result = self._result(run, output, loss)
        self._state.whole_arguments.check(taken)
        self._state.shared_arguments.check(batch, versions)
        return result

    def _noting(self, run: MicrobatchRun, *, is_loss: bool = False) -> AbstractContextManager[None]:
        """Note what the user's code runs that it did not run when it was recorded."""
        if self._state.uncovered is None:
            return _NOTHING
        noting = self._state.uncovered.noting
        hop = partial(_hop_here, run)
        return noting(run.microbatch, hop, is_loss=is_loss)

    @property
    def _draws_at_once(self) -> bool:
        """Whether the first hop draws, and begins with the forward itself and not at a mark."""
        context = self._state.context
        return bool(context.sources and context.sources[0]) and context.known.marks[:1] == [{}]

    def _offloading(self, run: MicrobatchRun) -> AbstractContextManager[None]:
        """What the forward saves on offloaded stages goes to the host."""
        hops = self._prepared.offloaded
        if not hops or not self._state.context.graphs.differentiable or not self._request.is_cut:
            return _NOTHING
        key = weakref.ref(run)  # the hooks stay in the graph, which the run holds

        def hop() -> int:
            found = key()
            return -1 if found is None else found.hop

        run.offload = Offload(hop, hops, self._stays, self._state.links)
        return run.offload.taking()

    def _stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is on its device anyway: a parameter's, a buffer's, the caller's."""
        return self._prepared.stays(storage) or storage_id(storage) in self._storages_of_caller

    @cached_property
    def _storages_of_caller(self) -> set[int]:
        """The storages of the batch, which the caller holds; micro-batches are slices of it."""
        batches = [(b.args, b.kwargs, b.target) for b in self._request.microbatches]
        return {
            storage_id(t.untyped_storage()) for t in tensors(batches) if t.layout is torch.strided
        }

    # --- results

    def _result(self, run: MicrobatchRun, output: Any, loss: Tensor | None) -> MicrobatchResult:
        """The values without graphs; a loss becomes a root of its hop's backward."""
        result = MicrobatchResult()
        m = run.microbatch
        run.notice_writes()
        if loss is not None:
            loss = run.newest(loss)
            check_differentiable(loss)
            result.loss = loss.detach().clone()  # the loss function may go on with its memory
            if self._request.weights[m]:  # otherwise it adds nothing, but 0 * NaN would be NaN
                root = self._state.root(m, result.loss)
                run.add_root(run.hop_of(loss), edge_of(loss), root)
        if "outputs" in self._request.want:
            if self._state.context.constants is not None:
                _check_own(run, output)
            starts_backward = "loss" not in self._request.want  # from the outputs, by the caller
            is_cut = self._request.is_cut
            keeps_edges = is_cut and starts_backward and self._state.context.graphs.differentiable
            for leaf in leaves(output):
                if keeps_edges:
                    result.edges.append(_edge(run, leaf))
                result.on_host.append(isinstance(leaf, Tensor) and run.stays(leaf))
            result.outputs = map_tensors(
                lambda t: t if starts_backward and not is_cut else run.newest(t).detach(), output
            )
            overwritten = self._prepared.recording.overwrites_outputs
            size = self._request.microbatches[m].size
            result.outputs = apart(result.outputs, size, overwritten=overwritten)
        return result


def _hop_here(run: MicrobatchRun) -> int:
    """Return the hop that the user's code is on; from a mark on it is the next one."""
    return run.place.hop_from(run.cursor.stage)


def _check_own(run: MicrobatchRun, output: Any) -> None:
    """Raise :class:`StateError` for an output that another micro-batch has left on an object: to
    return it is no operation, which would look."""
    read = run.reader()
    for tensor in tensors(output):
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and tag.key is not run.place.key:
            read(tensor, Reads())


def _edge(run: MicrobatchRun, leaf: Any) -> tuple[int, GradientEdge] | None:
    """The hop of an output's leaf and its place in the graph there, if it has a gradient."""
    if not isinstance(leaf, Tensor):
        return None
    leaf = run.newest(leaf)
    if not leaf.requires_grad:
        return None
    return run.hop_of(leaf), edge_of(leaf)
