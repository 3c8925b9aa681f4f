"""What the micro-batches of one step share: the context of their runs, their results, their random
streams."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._common.callsite import users_line
from .._common.coverage.code_events import IS_FREE
from .._common.coverage.uncovered_code import UncoveredCode
from .._common.nested import tensors
from ..batches.microbatch import Microbatch
from ..crossing.carried_values import Carried, CarriedValues
from ..crossing.constants import Constants
from ..crossing.host_stores import HostLinks
from ..crossing.microbatch_run import MicrobatchRun
from ..crossing.step_context import Graphs, StepContext
from ..devices.devices import is_asynchronous
from ..devices.digests import Comparisons
from ..devices.observer import Watch
from ..errors import StateError
from ..preparation.prepared import Prepared
from ..recording.plain_values.tensors.used_tensors import statistics_of
from ..stages.cursor import current_cursor
from .microbatch.attribute_uses import AttributeUses, LateUses
from .microbatch.kept_values import KeptValues
from .microbatch.left_kinds import LeftKinds, LeftTrained
from .microbatch.shared_arguments import SharedArguments
from .microbatch.whole_arguments import WholeArguments
from .step_mode import mode_of
from .step_randomness import StepRandomness
from .step_request import StepRequest


@dataclass
class MicrobatchResult:
    """The result of one micro-batch's forward: values without graphs, and their places in the
    graph.

    Attributes:
        loss: without a graph; ``None`` where no loss was asked for.
        outputs: in the model's structure; ``None`` where they were not asked for.
        edges: by leaf of the outputs, the hop and the place in its graph; ``None`` for a leaf
            without a gradient.
        on_host: by leaf of the outputs, whether the user's code wants it on the host.
    """

    loss: Tensor | None = None
    outputs: Any = None
    edges: list[tuple[int, GradientEdge] | None] = field(default_factory=list)
    on_host: list[bool] = field(default_factory=list)


class StepState:
    """The shared state of one step, from its first forward to its last backward.

    Args:
        request: what the step is asked to do.
    """

    def __init__(self, request: StepRequest) -> None:
        microbatches = request.microbatches
        differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.request = request
        self.inputs_need_grad = differentiable and any(map(_needs_grad, microbatches))
        self.randomness = StepRandomness(request)
        self.context = _context(request, self.randomness, differentiable=differentiable)
        self.context.begin()
        self.links = HostLinks()
        self.kept: KeptValues | None = None
        self.runs: dict[int, MicrobatchRun] = {}
        self.results: list[MicrobatchResult | None] = [None] * len(microbatches)
        # Names of what the forwards wrote, and had not written when the model was recorded. One by
        # one, micro-batches cannot mix in what they write, so nothing is looked at.
        self.written: dict[str, list[int]] = {}
        self.mode = mode_of(request, inputs_need_grad=self.inputs_need_grad)
        self.context.constants = None if self.mode.one_by_one else Constants()
        one_by_one = self.mode.one_by_one
        self.context.on_checkpoint = partial(_begins_checkpoint, request.prepared, one_by_one)
        turning = request.prepared.recording.turning
        self._kinds: LeftKinds | None = None
        if turning and not self.mode.one_by_one:
            self._kinds = LeftKinds(turning, request.prepared.route)
        self._trained: LeftTrained | None = None
        has_several = not self.mode.one_by_one and request.prepared.compiled is None
        self.uses = AttributeUses(request.prepared.attributes) if has_several else None
        self.late_uses = _late_uses(request.prepared) if has_several else None
        if request.prepared.recording.may_toggle and differentiable and not self.mode.one_by_one:
            schedule = request.prepared.schedule(request.schedule, len(microbatches))
            self._trained = LeftTrained(request.prepared, schedule)
        recording = request.prepared.recording
        is_new = differentiable and len(microbatches) > 1 and not request.prepared.has_compared
        if request.prepared.steps == 0 or is_new or recording.may_recompute_otherwise:
            self.context.comparisons = Comparisons()
            self.context.carried_values = _carried_by(request.prepared)
        self.uncovered: UncoveredCode | None = None
        if (way := recording.way) is not None:
            way.let_go()
            if has_several and (IS_FREE or way.may_leave):
                self.uncovered = UncoveredCode(way.coverage)
        self.shared_arguments = SharedArguments(microbatches, are_written=recording.writes_inputs)
        self.whole_arguments = WholeArguments(
            microbatches,
            viewed=recording.views_of_inputs,
            one_by_one=self.mode.in_one_thread and not self.context.has_copies,
        )
        self._roots: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def left(self, hop: int, m: int) -> None:
        """Look at what a micro-batch's forward leaves at the end of a hop, where the next one has
        not begun there."""
        if self.kept is not None:
            self.kept.left(hop, m)
        if self._kinds is not None:
            self._kinds.left(hop, m)
        if self._trained is not None:
            self._trained.left(hop, m)

    def be_on(self, stage: int) -> None:
        """Make a stage's accelerator the current one of this thread."""
        device = self.request.prepared.devices[stage]
        if is_asynchronous(device):
            torch.accelerator.set_device_index(device.index)

    def watch(self, tensor: Tensor, hop: int, m: int) -> Watch | None:
        """What the observer has for a copy from the caller to a hop."""
        observer = self.request.observer
        return None if observer is None else observer.watch(tensor, -1, hop, m)

    def root(self, m: int, loss: Tensor) -> Tensor:
        """Return the gradient that a micro-batch's loss starts from: its weight,
        scaled as the caller's loop scales a loss."""
        weight = self.request.weights[m]
        if self.request.isolate_as is not None:
            return self._scaled(torch.full_like(loss, weight))
        key = weight, loss.dtype, loss.device
        if key not in self._roots:
            self._roots[key] = self._scaled(torch.full_like(loss, weight))
        root = self._roots[key]
        return root if root.shape == loss.shape else root.view(loss.shape)

    def _scaled(self, root: Tensor) -> Tensor:
        scale = self.request.scale
        return root if scale is None else scale(root).to(root.dtype)

    def clean_up(self, *, keeps_graphs: bool) -> None:
        """Let go of what the runs hold: they are over, or the step has failed.

        Args:
            keeps_graphs: whether their graphs stay, for a backward that the caller starts.
        """
        for run in self.runs.values():
            if keeps_graphs:
                run.settle()
            else:
                run.abandon()
        self.context.settle()
        self.links.close()


def _carried_by(prepared: Prepared) -> CarriedValues | None:
    """Return the values that each forward leaves for the next one, if anything is recomputed."""
    if not prepared.recording.carried or not prepared.does_recompute:
        return None
    found = []
    for value in prepared.recording.carried:
        stages = {prepared.route[hop] for hop in value.hops}
        if len(stages) == 1:
            owner, key = value.place
            found.append(Carried(value.name, value.where, stages.pop(), owner, key))
    return CarriedValues(prepared.model, found)


def _needs_grad(batch: Microbatch) -> bool:
    """Return whether the caller's graph leads to a micro-batch's arguments or target."""
    for value in (*batch.args, *batch.kwargs.values(), batch.target):
        if isinstance(value, Tensor):  # as nearly always, and every micro-batch comes by here
            if value.requires_grad:
                return True
        elif value is not None and any(t.requires_grad for t in tensors(value)):
            return True
    return False


def _context(
    request: StepRequest, randomness: StepRandomness, *, differentiable: bool
) -> StepContext:
    prepared, schedule = request.prepared, request.schedule
    graphs = Graphs(
        differentiable=differentiable,
        cut=request.is_cut,
        split=not isinstance(schedule, str) or schedule.startswith(("zb", "auto")),
    )
    return StepContext(
        *(prepared.route, prepared.homes, prepared.devices, graphs, prepared.known_forward),
        sources=randomness.sources,
        isolate_as=request.isolate_as,
        observer=request.observer,
    )


def _late_uses(prepared: Prepared) -> LateUses:
    known = prepared.known_forward.hops_rerunning_forward
    rerun = {prepared.route[hop] for hop in (*known, *prepared.recording.may_rerun)}
    return LateUses(prepared.attributes, rerun)


def _may_change(prepared: Prepared) -> bool:
    """Whether forwards change something that outlives them, or may do so where a normalization
    that learns is called that no recorded call has called; in a loss, whether that does."""
    recording, cursor = prepared.recording, current_cursor()
    if cursor is not None and cursor.passes:
        return bool(recording.set_beside)
    is_written = any(held.written for held in recording.buffers)
    if recording.leaves_state or recording.changing or is_written:
        return True
    return any(module.training and statistics_of(module) for module in prepared.model.modules())


def _begins_checkpoint(prepared: Prepared, one_by_one: bool, kept: object, hop: int) -> None:
    """Note that a ``torch.utils.checkpoint`` begins on a hop, which the recording may not have met,
    and which may go on on later ones: their backwards set the states of generators.

    Raises:
        StateError: neither the recording nor the source told of it, and its recomputation may read
            what later forwards have changed by then.
    """
    recording = prepared.recording
    is_known = hop in prepared.known_forward.hops_rerunning_forward or hop in recording.may_rerun
    if not (is_known or one_by_one) and _may_change(prepared):
        raise StateError(
            f"a torch.utils.checkpoint began on stage {prepared.route[hop]} ({users_line()}) that "
            "the recorded forward has not, and this model changes something in its forwards: the "
            "recomputation, which comes after later forwards, may read or change the same; give "
            "Pipeline a sample that takes this way, let an attribute decide that is set between "
            "steps, pass checkpoint= to Pipeline, or use schedule='sequential'"
        )
    for info in recording.hops[hop:]:
        info.reruns_forward = True
