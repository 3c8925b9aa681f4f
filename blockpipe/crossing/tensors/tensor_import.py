"""May this tensor be read here? A tensor made on this hop may; one made on another is imported.

An import is a copy on this hop's device, cut from the graph it came from, whose gradient is carried
back when this hop's backward has run.

Same gradients, to the bit (design rule 1): a tensor read on several hops is imported from the
*previous* hop that read it, so that the later hop's partial sum enters the earlier hop's backward
as one more root gradient, and sums come about in the plain run's order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.threads.others import beside_this_thread
from ..._torch.modes import (
    has_tangent,
    inside_of_transforms,
    is_in_forward_mode,
    is_transformed,
    outside_of_transforms,
)
from ..._torch.tensors import is_ragged, memory_of, overlap, shape_of, version_of
from ...devices.ownership import Owner, copying, owner_of, set_owner
from ...errors import CrossingError, RouteError, StateError
from ...stages.cursor import SKIPPED_MARKS
from ..constants import Constants
from ..step_context import StepContext
from ..tags import MADE, RECORDING, TAG, UNCUT, Import, ParameterHome, Tag, latest
from .claims import Claims
from .gradients import Gradients
from .hop_copies import HopCopies
from .place import Place, Reads
from .tensor_attributes import class_attributes
from .writes import Writes


class TensorImport:
    """The rule by which one run finds what an operation on its hop gets in the place of a tensor.

    Args:
        step: what the run shares with the other runs of its step.
        place: where the run is.
        copies: the copies between its hops.
        gradients: where an import's way back is noted.
        writes: what was written in place.
        claims: tags what is made here.
    """

    def __init__(
        self,
        step: StepContext,
        place: Place,
        copies: HopCopies,
        gradients: Gradients,
        writes: Writes,
        claims: Claims,
    ) -> None:
        self._step = step
        self._place = place
        self._copies = copies
        self._gradients = gradients
        self._writes = writes
        self._claims = claims
        self._home_imports: dict[int, dict[int, Import]] = {}  # by id of a parameter, by hop

    def forget(self) -> None:
        """Release the imports: the forward is over."""
        self._home_imports.clear()

    def local(self, tensor: Tensor, reads: Reads) -> Tensor:
        """Return the tensor that an operation on this hop gets in the place of a tensor.

        Args:
            tensor: as the user's code has it.
            reads: where an import is noted, for :meth:`Writes.check` after the operation.
        """
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            return self._local_untagged(tensor, reads)
        if tag.newest is not None:
            tensor, tag = latest(tensor, tag)
        place = self._place
        if tag.key is not place.key:
            return self._of_another(tensor, tag, reads)
        if tag.hop == place.hop:
            return tensor
        if self._writes.reached_back:
            self._writes.check_current(tensor, tag)
        return self._imported(tensor, tag, reads)

    # --- tensors of no micro-batch's

    def _local_untagged(self, tensor: Tensor, reads: Reads) -> Tensor:
        step, place = self._step, self._place
        home = step.home_of(tensor)
        if home is not None:
            return self._at_home(tensor, home, reads)
        self._check_maker(tensor)
        if is_transformed(tensor):  # inside a torch.func transform, which stays on its stage
            self._check_transformed(tensor)
            return tensor
        if tensor.requires_grad and step.graphs.differentiable:
            if tensor.grad_fn is not None:
                raise CrossingError(
                    f"an operation on stage {place.stage} (micro-batch {place.microbatch}) reads a "
                    f"tensor of shape {shape_of(tensor)} that has a gradient path, but was made "
                    f"outside of this forward or by code that Blockpipe cannot intercept"
                    f"{beside_this_thread()} ({users_line()}); compute it inside the forward, in "
                    "its own thread, with torch operations (by torch.func: in a module of its "
                    f"own), detach it, or {UNCUT}"
                )
            return self._at_home(tensor, step.adopt(tensor, place.hop, place.stage), reads)
        return self._constant(tensor, reads)

    def _check_maker(self, tensor: Tensor) -> None:
        """Raise :class:`StateError` for a parameter that another micro-batch has made on another
        stage, if this one or one in between has made its own."""
        made: Tag | None = getattr(tensor, MADE, None)
        constants, key = self._step.constants, self._place.key
        if made is None or made.key is key or made.stage == self._place.stage or constants is None:
            return
        if not constants.read(tensor, made.site, made.key, key):
            raise _of_another(tensor, made, self._place)

    def _check_transformed(self, tensor: Tensor) -> None:
        """Raise :class:`CrossingError` for an argument of a transform that is on another device:
        the transform has wrapped it before anybody could see it."""
        inner = inside_of_transforms(tensor)
        tag: Tag | None = getattr(inner, TAG, None)
        step, place = self._step, self._place
        if tag is None or tag.key is not place.key or tag.stage == place.stage:
            return
        if step.isolate or step.device_of(place.stage) not in (None, inner.device):
            raise CrossingError(
                f"torch.func or torch.vmap on stage {place.stage} is given a tensor of shape "
                f"{shape_of(inner)} that was made on stage {tag.stage} ({users_line()}): it was "
                "wrapped before it could be copied; put the transform into a module of its own, "
                f"or pass it tensor.clone(), or {UNCUT}"
            )

    def _constant(self, tensor: Tensor, reads: Reads) -> Tensor:
        step, place = self._step, self._place
        device = step.device_of(place.stage)
        isolate_as = step.isolate_as
        if isolate_as is not None:
            here, owner = Owner(isolate_as, place.stage), owner_of(tensor)
            if owner is None or owner.pipeline != isolate_as:
                set_owner(tensor, here)
            if owner is None or owner.pipeline != isolate_as or owner == here:
                return from_outside(tensor, reads)
        elif device is None or tensor.device == device or step.stays(tensor):
            return from_outside(tensor, reads)
        elif tensor.is_meta:  # only its shape counts, as of torch's dummy behind nested tensors
            return tensor
        # The forward may have made it where nobody saw it, as the result of a transform.
        on_host = step.stays(tensor)
        value = step.lend(tensor, place.stage, on_host=on_host, is_new=True).receive()
        reads.append((tensor, Import(value, False, version_of(value))))
        return value

    # --- parameters, buffers, and other leaves

    def _at_home(self, tensor: Tensor, home: ParameterHome, reads: Reads) -> Tensor:
        step, place = self._step, self._place
        if home.hop == place.hop:
            return self._followed(tensor, reads) if home.is_adopted else tensor
        if home.is_written and step.constants is not None:
            raise StateError(
                f"{home.name!r} is written by the forward on stage {home.stage} and read on stage "
                f"{place.stage} ({users_line()}): micro-batches under way at once would mix in it; "
                "read and write it on one hop, or read it between steps, or use "
                "schedule='sequential'"
            )
        needs_gradient = tensor.requires_grad and step.graphs.differentiable
        if home.stage == place.stage and not needs_gradient:
            return tensor
        if home.hop > place.hop and needs_gradient:
            name, seen = repr(home.name), "than recorded"
            if home.is_adopted:
                name, seen = f"a leaf of shape {shape_of(tensor)}", "than another micro-batch"
            raise RouteError(
                f"micro-batch {place.microbatch} reads {name} on stage {place.stage}, earlier "
                f"{seen} (first on stage {home.stage}; {users_line()}); give Pipeline a sample "
                f"that takes the longest way; {SKIPPED_MARKS}; where data choose what a stage "
                "reads, as a layer of a pool that stages share, use schedule='uncut'"
            )
        imports = self._home_imports.setdefault(id(tensor), {})
        found = imports.get(place.hop)
        if found is None:
            if home.stage == place.stage and not step.isolate:
                value = tensor
            else:
                watch = step.watch(tensor, home.hop, place.hop, place.microbatch)
                value = step.copy_of(tensor, place.stage, watch, on_host=step.stays(tensor))
            found = outside_of_transforms(self._enter, tensor, value, imports, home.hop)
            self._note_import(tensor, home.hop, home.name)
        found.share_attributes(tensor)
        reads.append((tensor, found))
        return found.value

    def _followed(self, leaf: Tensor, reads: Reads) -> Tensor:
        """Return a leaf from outside that needs a gradient, on the first hop that reads it. From
        another accelerator it is brought by an operation of this hop's graph, where later hops send
        their gradients."""
        device = self._step.device_of(self._place.stage)
        if device is None or leaf.device == device or self._step.stays(leaf):
            return leaf
        imports = self._home_imports.setdefault(id(leaf), {})
        found = imports.get(self._place.hop)
        if found is None:
            with torch.enable_grad():  # a later reader may need the gradient
                value = leaf.to(device)
            found = imports[self._place.hop] = Import(value, True, version_of(value))
        reads.append((leaf, found))
        return found.value

    # --- tensors of another micro-batch, or step

    def _of_another(self, tensor: Tensor, tag: Tag, reads: Reads) -> Tensor:
        needs_gradient = tensor.requires_grad and self._step.graphs.differentiable
        if tag.stage == self._place.stage and not needs_gradient:
            return tensor  # running state: a lane takes the micro-batches in order
        if self._may_share(tensor, tag):
            return self._shared(tensor, tag, reads)
        if tag.key.is_beyond(self._place.key) and not needs_gradient:
            return self._constant(tensor, reads)
        raise _of_another(tensor, tag, self._place)

    def _may_share(self, tensor: Tensor, tag: Tag) -> bool:
        """Return whether another micro-batch's tensor is a constant, made once for all of them."""
        if tensor.requires_grad or not tag.is_constant(tensor):
            return False
        if self._place.key.step == RECORDING:
            return True
        if tag.key.step == RECORDING and tensor.device != self._step.device_of(tag.stage):
            return False  # a recording for real, before the model was placed
        constants = self._step.constants
        return constants is None or constants.read(tensor, tag.site, tag.key, self._place.key)

    def _shared(self, tensor: Tensor, tag: Tag, reads: Reads) -> Tensor:
        """Return such a constant where this hop reads it; no gradient flows to it."""
        step, stage = self._step, self._place.stage
        device, on_host = step.device_of(stage), step.stays(tensor)
        if not step.isolate and (device in (None, tensor.device) or on_host):
            return tensor
        value = step.copy_of_constant(tensor, tag, stage, on_host=on_host)
        reads.append((tensor, Import(value, False, version_of(value))))
        return value

    # --- tensors of another hop

    def _imported(self, tensor: Tensor, tag: Tag, reads: Reads) -> Tensor:
        if tag.imports is None:
            tag.imports = {}
        found = tag.imports.get(self._place.hop)
        if found is None:
            found = outside_of_transforms(self._import, tensor, tag, tag.imports)
        found.share_attributes(tensor)
        reads.append((tensor, found))
        return found.value

    def _check_layout(self, tensor: Tensor) -> None:
        """Raise :class:`CrossingError` for a tensor whose gradient has no way back."""
        is_nested = is_ragged(tensor)
        is_dense = tensor.layout in (torch.strided, torch.jagged) and not is_nested
        if is_dense or not tensor.requires_grad or not self._step.graphs.differentiable:
            return
        kind = "nested (torch.strided)" if is_nested else str(tensor.layout)
        raise CrossingError(
            f"expected a dense tensor with the gradient path that goes to stage "
            f"{self._place.stage}, got one whose layout is {kind} ({users_line()}): autograd has "
            "no views of it, so that its gradient cannot go back; let the dense tensor cross that "
            f"it is made of, and make it where it is read, or {UNCUT}"
        )

    def _check_memory(self, tensor: Tensor) -> None:
        """Raise :class:`StateError` for a view of what the forward writes to, which no recording
        has shown."""
        home = self._step.written_memory.get(memory := memory_of(tensor))
        if home is None or memory_of(home.tensor) != memory:  # it has got other memory since
            return
        if overlap(tensor, home.tensor):
            raise StateError(
                f"{home.name!r} is written by the forward on stage {home.stage}, and a view of it, "
                f"of shape {shape_of(tensor)}, is read on stage {self._place.stage} "
                f"({users_line()}): micro-batches under way at once would mix in it; let "
                "view.clone() cross, or use schedule='sequential'"
            )

    def _check_tangent(self, tensor: Tensor) -> None:
        """Raise :class:`CrossingError` for a tensor that has a tangent."""
        with copying():  # to look for it is an operation, which the stage sanitizer would see
            found = has_tangent(tensor)
        if found:
            raise CrossingError(
                f"an operation on stage {self._place.stage} reads a tensor of shape "
                f"{shape_of(tensor)} of another stage that has a tangent of forward-mode AD "
                f"({users_line()}): it would be lost on the way; {UNCUT}"
            )

    def _import(self, tensor: Tensor, tag: Tag, imports: dict[int, Import]) -> Import:
        step = self._step
        if is_in_forward_mode():
            self._check_tangent(tensor)
        self._check_layout(tensor)
        if step.written_memory:
            self._check_memory(tensor)
        self._writes.before_import(tensor, tag)
        copied = self._copies.bring(tensor, tag.hop, on_host=step.stays(tensor))
        found = self._enter(tensor, copied, imports, tag.hop)
        self._claims.tag(found.value)
        if tag.is_constant(tensor):
            its_tag: Tag = getattr(found.value, TAG)
            its_tag.constant, its_tag.site = version_of(found.value), tag.site
        if step.is_mixed and step.stays(tensor):
            getattr(found.value, TAG).is_kept = True
        if step.known.tracks_writes:
            self._writes.join_aliases(tensor, found)
        self._note_import(tensor, tag.hop, None)
        return found

    def _enter(
        self, tensor: Tensor, value: Tensor, imports: dict[int, Import], home_hop: int
    ) -> Import:
        """Make an import: an entry of this hop's graph if there is a gradient to carry back."""
        hop = self._place.hop
        is_entry = tensor.requires_grad and self._step.graphs.differentiable
        if value is tensor:  # whose own edge would call its hooks in this hop's backward, too
            value = tensor.detach()
        if is_entry:
            from_hop, from_tensor = home_hop, tensor
            for earlier_hop, earlier in imports.items():
                if from_hop <= earlier_hop < hop and earlier.is_entry:
                    from_hop, from_tensor = earlier_hop, earlier.value
            on_host = self._step.stays(tensor)
            value = self._gradients.enter(value, from_tensor, from_hop, on_host=on_host)
        made = Import(value, is_entry, version_of(value), besides=class_attributes(value))
        if not value.is_inference():  # else nothing tells whether it is written
            imports[hop] = made
            self._writes.follow(tensor, made)
        return made

    def _note_import(self, tensor: Tensor, home_hop: int, name: str | None) -> None:
        listener = self._place.listener
        if listener is not None:
            listener.imported(tensor, home_hop, name)


def from_outside(tensor: Tensor, reads: Reads) -> Tensor:
    """Return a tensor that is nobody's as it is; only a write makes it this micro-batch's."""
    reads.outside = (*reads.outside, (tensor, version_of(tensor)))
    return tensor


def check_asked(tensor: Tensor, place: Place, stage: int, constants: Constants | None) -> None:
    """Raise :class:`StateError` for a question about a tensor of another micro-batch of this step,
    which another stage has left where this micro-batch's own was.

    Args:
        tensor: the tensor.
        place: where the run is.
        stage: the stage whose code asks; the run comes there with its next operation.
        constants: of the step.
    """
    tag: Tag | None = getattr(tensor, TAG, None)
    if tag is None or tag.key is place.key:
        return
    own, its = place.key, tag.key  # a recomputation has another key for the same micro-batch
    is_beside = its.step == own.step and its.microbatch != own.microbatch
    if not is_beside or tag.stage == stage:
        return
    is_table = tag.is_constant(tensor)
    if not is_table or (constants is not None and not constants.asks(tensor, tag.site, its, own)):
        raise _of_another(tensor, tag, replace(place, stage=stage))


def _of_another(tensor: Tensor, tag: Tag, place: Place) -> StateError:
    step = (
        "this step"
        if tag.key.step == place.key.step
        else "the recording (it is still there: clear it)"
        if tag.key.step == RECORDING
        else "an earlier step"
    )
    why = "has a gradient path" if tensor.requires_grad else f"was made on stage {tag.stage}"
    remedy = "pass the tensor along, " + ("detach it, " if tag.stage == place.stage else "")
    return StateError(
        f"micro-batch {place.microbatch} on stage {place.stage} reads a tensor of shape "
        f"{shape_of(tensor)} that belongs to micro-batch {tag.key.microbatch} of {step} and "
        f"{why} ({users_line()}): state on self or in a global is shared by all micro-batches; "
        f"{remedy}or keep one for each current_microbatch()"
    )
