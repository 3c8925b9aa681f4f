"""Which of three ways a step takes: the plain loop, one thread, or a thread for each lane.

============  ==========================================  ===================================
way           when                                        what it saves
============  ==========================================  ===================================
plain loop    one thread, and no stage border has to be   all of Blockpipe's work in a step
              seen
one thread    threads cannot pay: one lane, one           threads; each micro-batch goes out
              micro-batch, small operations,              and comes back before the next,
              ``"sequential"``; or the step compiles      which needs the least memory
lanes         otherwise                                   time: lanes run at once
============  ==========================================  ===================================
"""

from collections.abc import Hashable
from dataclasses import dataclass

from .step_request import StepRequest


@dataclass(frozen=True)
class StepMode:
    """How a step runs; decided before it begins.

    Attributes:
        one_by_one: each micro-batch goes out and comes back before the next, in this step and in
            later ones like it.
        is_compiling: compiled modules run for the first time. They are compiled, and captured, in
            one thread.
        is_plain_loop: a whole step (forwards and backwards) can be the plain loop.
        unsettled: the sizes of the micro-batches, if for these a hop may set, or make anew, what
            others read; ``None`` if they do not.
        stays: whether all later steps like it run one by one as well.
    """

    one_by_one: bool
    is_compiling: bool
    is_plain_loop: bool
    unsettled: frozenset[Hashable] | None = None
    stays: bool = False

    @property
    def in_one_thread(self) -> bool:
        """Whether the caller's thread does everything."""
        return self.one_by_one or self.is_compiling


def mode_of(request: StepRequest, *, inputs_need_grad: bool) -> StepMode:
    """Decide how a step runs.

    Args:
        request: what the step is asked to do.
        inputs_need_grad: whether the caller gets gradients of its inputs.
    """
    prepared = request.prepared
    unsettled = prepared.step_sizes.unsettled(prepared.recording, request.microbatches)
    is_inline = prepared.runs_inline(request.schedule, len(request.microbatches))
    one_by_one = unsettled is not None or is_inline
    stays = is_inline or (one_by_one and bool(prepared.recording.turns_by_size))
    is_compiling = prepared.compiled is not None and prepared.steps == 0
    is_plain_loop = (
        (one_by_one or is_compiling)
        and _may_leave_graph_whole(request, inputs_need_grad=inputs_need_grad)
        and _has_no_border(request)
    )
    return StepMode(one_by_one, is_compiling, is_plain_loop, unsettled, stays)


def _may_leave_graph_whole(request: StepRequest, *, inputs_need_grad: bool) -> bool:
    """Whether nothing that the user asked for needs the engine between the operations: the
    sanitizer, gradients of inputs, recomputation, or a plan of a forward that calls modules again
    in its backward (``torch.utils.checkpoint``), for a plan goes by the number of a call.

    ``"uncut"`` leaves the graph whole as well, but it runs on the stages' devices.
    """
    if request.isolate_as is not None or not request.is_cut:
        return False
    prepared = request.prepared
    if prepared.planned and any(hop.reruns_forward for hop in prepared.recording.hops):
        return False
    return not (inputs_need_grad or prepared.does_recompute)


def _has_no_border(request: StepRequest) -> bool:
    """Whether no tensor has to be moved at a stage's border, and nothing else depends on one.

    Where a model has several stages its first step is cut all the same: it finds what a cut would
    refuse on the machine that the model is meant for. ``"sequential"`` is for looking at
    the cut engine one micro-batch at a time.
    """
    prepared = request.prepared
    if prepared.is_one_hop:
        return True
    if request.schedule == "sequential" or prepared.steps == 0:
        return False
    return prepared.has_one_lane and prepared.on_one_device


def reason_of(mode: StepMode, request: StepRequest) -> str:
    """Say how a step runs, and why, for the log."""
    prepared = request.prepared
    if not mode.in_one_thread:
        return f"on {len(set(prepared.lane_of_hop))} lanes, a thread each"
    if mode.is_compiling:
        return "in one thread: the first step compiles"
    if len(request.microbatches) == 1:
        return "in one thread: there is nothing to overlap"
    if request.schedule in ("sequential", "uncut"):
        return f"in one thread: schedule={request.schedule!r}"
    if prepared.recording.given_at:
        return f"in one thread: it uses a changing number at {prepared.recording.given_at}"
    if prepared.recording.written_late:
        return f"in one thread: an earlier step has written {prepared.recording.written_late}"
    if mode.unsettled is not None and prepared.recording.turns_by_size:
        return f"in one thread: sizes decide what is read at {prepared.recording.turns_by_size}"
    if mode.unsettled is not None:
        return "in one thread: modules of several hops make tables that they keep"
    if prepared.is_small:
        return "in one thread: operations are so small that threads would not pay"
    return "in one thread: all stages are on one lane"
