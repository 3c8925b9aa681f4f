"""A run: one micro-batch's trip along the route, forward and back.

This is where the run is, and its face to the rest of the engine. What happens to its tensors is in
:mod:`blockpipe.crossing.tensors`: what may be read here, what was made and written here, and each
hop's backward, which is an action of the schedule like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from .._common.callsite import users_line
from .._common.nested import map_tensors, tensors
from .._common.threads.thread_state import ours
from .._torch.modes import is_in_forward_mode
from .._torch.tensors import shape_of
from ..devices.copies import PendingCopy
from ..devices.rng_streams import torchs_of
from ..errors import CrossingError, RouteError
from ..stages.cursor import SKIPPED_MARKS, Cursor
from .offload import Offload
from .recompute import RecomputedCall, RecomputeSpec, SealedCall
from .step_context import StepContext
from .tags import TAG, UNCUT, Import, MicrobatchKey, Tag, latest
from .tensors.claims import Claims
from .tensors.gradients import Gradients
from .tensors.hop_copies import HopCopies
from .tensors.input_slices import InputSlices
from .tensors.place import Listener, Place, Reads
from .tensors.tensor_attributes import class_attributes, share_attributes
from .tensors.tensor_import import TensorImport
from .tensors.writes import Writes

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
Reader = Callable[[Tensor, Reads], Tensor]


@dataclass(frozen=True)
class ForwardPosition:
    """The position of a run in its forward."""

    hop: int
    stage: int
    cursor: Cursor


class MicrobatchRun:
    """One micro-batch under way.

    Args:
        step: what it shares with the other runs of its step.
        microbatch: its index.
        cursor: moved by the marks of its forward.
        key: which run it is, if that does not follow from the step.
        listener: notices what it does; a recording does.

    Attributes:
        sealed: how many sealed modules the forward is inside of.
        recomputes: whether this micro-batch's activations are recomputed.
        on_border: called with the hop that the run leaves and the one that it comes to.
        on_arrival: called with the stage, behind a border.
        claims: tags what it makes.
        gradients: its hops' graphs.
        writes: what it has written to in place.
        slices: the caller's tensors that it reads.
    """

    importing: ClassVar[type[TensorImport]] = TensorImport

    def __init__(
        self,
        step: StepContext,
        microbatch: int,
        cursor: Cursor,
        key: MicrobatchKey | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.step = step
        self.key = MicrobatchKey(step.number, microbatch, step.known.number) if key is None else key
        self.microbatch = microbatch
        self.cursor = cursor
        self.place = Place(self.key, microbatch, listener)
        self.sealed = 0
        self.recomputes = False
        self.on_border: Callable[[int, int], None] | None = None
        self.on_arrival: list[Callable[[int], None]] = []
        self._copies = HopCopies(step, self.place)
        self.slices = InputSlices()
        self.writes = Writes(step, self.place)
        self.claims = Claims(step, self.place)
        self.gradients = Gradients(step, self.place, self._copies)
        self._imports = self.importing(
            step, self.place, self._copies, self.gradients, self.writes, self.claims
        )
        self._marks = Counter[int]()  # by stage, since the run came to the hop
        cursor.on_move = self._marked

    # --- where the run is

    @property
    def hop(self) -> int:
        """The index of the hop that it is on; -1 before the first."""
        return self.place.hop

    @property
    def stage(self) -> int:
        """The stage of that hop."""
        return self.place.stage

    def arrive(self) -> int:
        """Go to the hop that the cursor asks for; return its index. This crosses the border if the
        cursor has moved."""
        place = self.place
        if self.cursor.stage != place.stage:
            if self.sealed:
                raise RouteError(
                    f"micro-batch {self.microbatch} moved to stage {self.cursor.stage} inside a "
                    f"module that stayed on stage {place.stage} when it was recorded "
                    f"({users_line()}); give Pipeline a sample that takes this way"
                )
            if place.listener is not None:
                place.listener.departs(self.cursor.stage)
            self._cross(self.next_hop(self.cursor.stage))
        return place.hop

    def next_hop(self, stage: int) -> int:
        """Return the index of the next hop of the route on a stage."""
        route = self.step.route
        for hop in range(self.place.hop + 1, len(route)):
            if route[hop] == stage:
                return hop
        raise RouteError(
            f"micro-batch {self.microbatch} goes to stage {stage} after "
            f"{route[: self.hop + 1]}, but the recorded route is {route} and has no stage {stage} "
            f"after that ({users_line()}); it may skip hops, but not add or reorder them: "
            f"give Pipeline a sample that takes the longest way; {SKIPPED_MARKS}"
        )

    def is_sealed(self, hops: frozenset[int]) -> bool:
        """Return whether a module that is sealed on these hops runs untouched where it is called
        now."""
        place, stage = self.place, self.cursor.stage
        return (place.hop if stage == place.stage else self.next_hop(stage)) in hops

    def position(self) -> ForwardPosition:
        """Return the position of the run, for another run to go on from."""
        return ForwardPosition(self.hop, self.stage, self.cursor.copy())

    def resume_at(self, position: ForwardPosition) -> None:
        """Go to the position of another run; the cursor is there already, and moves nobody at
        once."""
        self.place.hop, self.place.stage = position.hop, position.stage
        self.cursor.on_move = None

    def _marked(self, stage: int) -> None:
        """Follow a mark that asks for a stage. Where the recording had a hop begin with this very
        mark, wait for the turn at once: the user's code may read its own state before its first
        operation."""
        self._marks[stage] += 1
        if stage != self.stage and (self.sealed or self._next_begins_here(stage)):
            with ours():
                self.arrive()

    def _next_begins_here(self, stage: int) -> bool:
        """Return whether the recording had the stage's next hop begin with the mark just met.

        The hops before that one are skipped if nothing ran in their blocks. Other marks of the
        stage began no hop, so the run must not go there with them. The number of a mark among all
        of the forward's would not do: a forward that skips a block skips its marks.
        """
        passed = 0
        for hop in range(self.hop + 1, len(self.step.known.marks)):
            passed += self.step.known.marks[hop].get(stage, 0)
            if self.step.route[hop] == stage:
                return passed == self._marks[stage]
        return False

    def _cross(self, hop: int) -> None:
        place = self.place
        self.writes.leave_hop()
        before = place.hop
        if before >= 0:
            self._copies.leave(before, place.stage)
        place.hop, place.stage = hop, self.cursor.stage
        self._marks.clear()
        if self.on_border is not None:
            self.on_border(before, hop)
        for arrived in self.on_arrival:
            arrived(place.stage)
        if place.listener is not None:
            place.listener.arrived()

    # --- what is read and written here

    def reader(self) -> Reader:
        """Return the function that says what an operation here gets in the place of a tensor."""
        return self._imports.local

    def receive(self, hop: int, sent: PendingCopy) -> Tensor:
        """Return values that were sent to a hop, there to be read until the hop is over."""
        return self._copies.receive(hop, sent)

    def check_written(self, reads: Iterable[tuple[Tensor, Import]]) -> None:
        """Check after an operation or a sealed call whether it wrote to one of its imports."""
        self.writes.check(reads)

    def notice_writes(self) -> None:
        """Look which of this hop's imports were written to, in whatever way."""
        self.writes.notice()

    def newest(self, tensor: Tensor) -> Tensor:
        """Return a tensor as later hops left it."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            return tensor
        if tag.newest is not None:
            tensor, tag = latest(tensor, tag)
        if self.writes.reached_back:
            self.writes.check_current(tensor, tag)
        return tensor

    def holder_of_gradient(self, tensor: Tensor, read: Reader) -> Tensor:
        """Return what has the ``.grad`` that a tensor is asked for here: no copy of it.

        Args:
            tensor: as the user's code has it.
            read: reads the arguments of other operations, and checks that they may be read.
        """
        value = read(tensor, Reads())
        # A recording may have put another one in the place of a parameter.
        is_replaced = self.place.listener is not None and not hasattr(tensor, TAG)
        return value if is_replaced else tensor

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device on which the stage that asks finds a tensor."""
        own, device = tensor.device, self.step.device_of(max(self.cursor.stage, 0))
        if device is None or own.type == "meta" or self.step.stays(tensor):
            return own
        return device

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host because the user's code wants it there."""
        return self.step.stays(tensor)

    # --- recomputation

    def is_recomputing(self) -> bool:
        """Return whether calls that can be recomputed are recomputed where the run is now."""
        asked = self.cursor.checkpoint
        mode = self.recomputes if asked is None else asked
        if mode and is_in_forward_mode():  # a recomputation comes when the tangents are gone
            return False
        return mode and self.step.graphs.differentiable and torch.is_grad_enabled()

    def recomputed(
        self,
        recompute_spec: RecomputeSpec,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        modes: Sequence[TorchFunctionMode],
    ) -> RecomputedCall:
        """Return a sealed call on this hop that will be recomputed."""
        known = self.step.sources[self.hop] if self.step.sources else []
        device = self.step.device_of(self.stage) or torch.device("cpu")
        recomputed = RecomputedCall(
            recompute_spec,
            SealedCall(function, args, kwargs, modes, self.stage, self.microbatch),
            known or torchs_of(device),
            offload=self.gradients.offload,
            comparisons=self.step.comparisons,
            carried=self.step.carried_values,
        )
        self.gradients.recomputed_calls.setdefault(self.hop, []).append(recomputed)
        return recomputed

    # --- inputs, results, and the way back

    def take_input(self, tensor: Tensor, index: int = 0) -> Tensor:
        """Return a micro-batch's slice of an input as if it were made on the hop where the run is:
        on the first one before the run has begun, on the last one for the target."""
        return self.take_part(tensor, self.take_memory(tensor), index)

    def take_memory(self, tensor: Tensor) -> Tensor:
        """Return the memory of an input where the inputs are read."""
        hop, stage = self._where_inputs_are()
        watch = self.step.watch(tensor, -1, hop, self.microbatch)
        value = self.receive(hop, self.step.lend(tensor, stage, watch))
        return self.slices.take(tensor, value, watches=self.step.graphs.differentiable)

    def take_part(self, tensor: Tensor, value: Tensor, index: int = 0) -> Tensor:
        """Return an input, given its values there, as if it were made on the hop."""
        step = self.step
        hop, stage = self._where_inputs_are()
        if tensor.requires_grad and step.graphs.differentiable:
            value = self.gradients.enter_input(value, hop, index)
        share_attributes(tensor, value, class_attributes(value))
        setattr(value, TAG, Tag(self.key, hop, stage))
        return value

    def _where_inputs_are(self) -> tuple[int, int]:
        """Return the hop of the inputs and its stage."""
        place = self.place
        if place.hop >= 0:
            return place.hop, place.stage
        return 0, self.step.route[0] if self.step.route else 0

    def hop_of(self, tensor: Tensor) -> int:
        """Return the hop that a result of this run was made on."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and tag.key is self.key:
            return tag.hop
        home = self.step.home_of(tensor)
        return self.hop if home is None else home.hop

    @property
    def offload(self) -> Offload | None:
        """The part that keeps saved tensors in host memory, where stages are offloaded."""
        return self.gradients.offload

    @offload.setter
    def offload(self, offload: Offload | None) -> None:
        self.gradients.offload = offload

    @property
    def input_gradients(self) -> dict[int, Tensor]:
        """The gradient of each input, by the input's index."""
        return self.gradients.input_gradients

    def add_root(self, hop: int, edge: GradientEdge, gradient: Tensor | None) -> None:
        """Start the backward of a hop from here, too."""
        self.gradients.add_root(hop, edge, gradient)

    def add_sent_root(self, hop: int, edge: GradientEdge, gradient: PendingCopy) -> None:
        """Start the backward of a hop also from here, with a gradient that is on its way."""
        self.gradients.add_sent_root(hop, edge, gradient)

    def restore(self, hop: int) -> None:
        """Bring back what a hop has saved, or recompute it, before the gradient is there."""
        self.slices.notice_writes()
        self.gradients.restore(hop)

    def backward(
        self, hop: int, *, split: bool = False, before_whole: Callable[[], None] | None = None
    ) -> None:
        """Run one hop's backward: see :meth:`Gradients.backward`."""
        self.slices.notice_writes()
        self.gradients.backward(hop, split=split, before_whole=before_whole)

    def finish_backward(self, hop: int) -> None:
        """Compute the gradients of a hop's parameters, where its backward is in two parts."""
        self.slices.notice_writes()
        self.gradients.finish_backward(hop)

    # --- the end

    def finish_forward(self) -> None:
        """Release everything that only the forward needed."""
        self.cursor.on_move = None
        self.writes.forget()
        self.slices.finish_forward()
        self._imports.forget()
        self.on_border = None
        self.on_arrival.clear()
        if not self.step.graphs.differentiable:
            self._copies.end_without_backward()

    def settle(self) -> None:
        """Wait for the copies between hops, before any hop's tensors are written or freed."""
        self._copies.settle_all()

    def abandon(self) -> None:
        """Release everything: the step has failed, or is over."""
        self.finish_forward()
        self.settle()
        self.slices.forget()
        self.gradients.abandon()

    # --- what is done to tensors themselves

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether this run made a tensor."""
        tag: Tag | None = getattr(tensor, TAG, None)
        return tag is not None and tag.key is self.key

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made, or lives, on another hop than this one."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None:
            is_cut = tag.hop != self.hop if tag.key is self.key else tensor.requires_grad
            return is_cut or tag.stage != self.stage or tag.newest is not None
        home = self.step.home_of(tensor)
        return home is not None and home.hop != self.hop

    def _refuse_foreign(self, what: str, read: Iterable[Tensor], given: Collection[int]) -> None:
        for tensor in read:
            if self.is_foreign(tensor) and id(tensor) not in given:
                raise CrossingError(
                    f"{what} on stage {self.stage} is given a tensor of shape {shape_of(tensor)} "
                    f"of another stage, or of an earlier visit of this one ({users_line()}): the "
                    f"graph is cut between them; {UNCUT}"
                )

    def handed(
        self,
        func: Callable[..., Any],
        args: Arguments,
        kwargs: Keywords,
        read: Reader,
        given: Collection[int] = (),
    ) -> Reader:
        """Check the arguments of a function that is about tensors themselves, so that no copy can
        stand in: it replaces a tensor's data or history, or runs a backward in the forward.

        Args:
            func: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            read: reads the arguments of other operations.
            given: ids of tensors that a call under way was given, as copies.

        Returns:
            The function that reads its arguments.

        Raises:
            CrossingError: it is given a tensor of another stage, and autograd cannot follow it
                over the cut.
        """
        if func is torch.autograd.grad:
            self._refuse_foreign("autograd.grad", tensors((args, kwargs)), given)
        elif func.__name__ != "backward":  # that begins at a copy, and ends at the cut behind it
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            what = f"an assignment to .{attribute}" if attribute else func.__name__
            self._refuse_foreign(what, args[:1], given)
        return read


def detached(value: Any) -> Any:
    """Return a nested value with every tensor cut off from autograd, and from our tags."""
    return map_tensors(Tensor.detach, value)
