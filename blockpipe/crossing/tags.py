"""What a crossing is made of: tags, imports, entries into a hop's graph, homes; and the step.

What is known of a tensor is kept on the tensor (:class:`Tag`), and what is known of a storage on
the storage (:class:`Aliases`): both die with what they describe, and neither refers back to it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch.graph import PythonNode
from .._torch.pickles import leave_out
from .._torch.tensors import version_of
from ..devices.copies import PendingCopy
from ..devices.ownership import copying
from ..errors import CrossingError
from .constants import is_written
from .tensors.tensor_attributes import share_attributes

TAG = "_blockpipe_tag"
MADE = "_blockpipe_made"  # the tag of a parameter that a forward has made, which is nobody's
RECORDING = -1  # the number of the recording's step
_ALIASES = "_blockpipe_aliases"
UNCUT = (
    "use schedule='uncut' (one ordinary graph, one micro-batch at a time), "
    "or put both operations on one stage"
)


leave_out("_blockpipe_")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MicrobatchKey:
    """The run that a tensor belongs to; compared by identity, printed in errors. The cut is that of
    the model into stages, by a number: each recording makes one."""

    step: int
    microbatch: int
    cut: int = -1

    def is_beyond(self, other: MicrobatchKey) -> bool:
        """Return whether it was a step of another pipeline, or of this one with another cut: the
        number of its stage says nothing to the other run, and the step is over."""
        return self.step != RECORDING and self.cut != other.cut


class Tag:
    """A tensor's relation to a run: which run's it is, on which hop it was made, and where it was
    imported to."""

    __slots__ = (
        *("constant", "copies", "hop", "imports", "is_kept", "key", "newest", "site", "stage"),
    )

    def __init__(self, key: MicrobatchKey, hop: int, stage: int) -> None:
        self.key = key
        self.hop = hop
        self.stage = stage
        self.imports: dict[int, Import] | None = None
        self.newest: Tensor | None = None  # where a later hop wrote to it: the tensor that counts
        self.is_kept = False  # on the host, where the user's code asked for it
        self.constant: int | None = None  # the version at which it is one, if it is
        self.site: Hashable = None  # of a constant: what made it
        # Of a constant, for other micro-batches:
        self.copies: dict[Hashable, PendingCopy] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Have no tag on copies and pickles of a tensor: they belong to no run."""
        return type(None), ()

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether its tensor was computed from nothing of a micro-batch's, and not written
        to since; see :mod:`blockpipe.crossing.constants`."""
        if self.constant is None or self.constant != version_of(tensor):
            return False
        return not tensor.is_inference() or not is_written(tensor)


def latest(tensor: Tensor, tag: Tag) -> tuple[Tensor, Tag]:
    """Return a tensor as the latest hop that wrote to it left it, and its tag."""
    while tag.newest is not None:
        tensor = tag.newest
        tag = getattr(tensor, TAG)
    return tensor, tag


def was_written(tensor: Tensor, version: int) -> bool:
    """Return whether a run wrote in place to a tensor that had this version, on any hop."""
    tag: Tag | None = getattr(tensor, TAG, None)
    return version_of(tensor) != version or (tag is not None and tag.newest is not None)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Import:
    """A tensor's copy on a hop, and whether it is an entry of that hop's graph."""

    value: Tensor
    is_entry: bool
    version: int
    aliases: Aliases | None = None
    besides: Collection[str] = ()  # attributes of the value that are its class's

    def share_attributes(self, tensor: Tensor) -> None:
        """Set on the copy what is set on the tensor."""
        share_attributes(tensor, self.value, self.besides)

    def return_attributes(self, tensor: Tensor) -> None:
        """Set on the tensor what was set on the copy."""
        share_attributes(self.value, tensor, self.besides)


class Aliases:
    """The tensors that share a storage, across their copies: how many were imported, and where they
    were written."""

    __slots__ = ("imported", "written_on")

    def __init__(self) -> None:
        self.imported = 0
        self.written_on: int | None = None


@dataclass(slots=True)
class ParameterHome:
    """The place where a parameter or buffer lives. It holds the tensor, so that its id stays its
    own."""

    tensor: Tensor
    hop: int
    stage: int
    name: str
    is_written: bool = False  # by the forward, on this hop
    is_adopted: bool = False  # a leaf from outside, which no module of the model registered


@dataclass(slots=True)
class GradientSlot:
    """The place where a gradient arrives while its hop's backward runs; closed at any other
    time."""

    gradient: Tensor | None = None
    open: bool = False


@dataclass(slots=True)
class Crossing:
    """The way back of one import: the gradient arrives in the slot and goes to an edge of a hop."""

    entry: GradientEdge | None  # where it arrives; kept only where backwards are split
    slot: GradientSlot
    to_hop: int
    to_edge: GradientEdge
    on_host: bool = False  # the tensor is on the host wherever it is read, and so its gradient


@dataclass(slots=True)
class HopGraph:
    """The roots that a hop's backward starts from, and the gradients that it hands on."""

    roots: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list)
    arriving: list[PendingCopy] = field(default_factory=list)  # of the roots' gradients
    crossings: list[Crossing] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # alive, until the backward is over


class GraphEntry(torch.autograd.Function):
    """The place where a crossing enters a hop's graph. It keeps the gradient, and nothing of the
    data.

    Not a leaf: the user's operation may write to it in place. Its output is a ``detach`` made
    without grad, which autograd takes for no view.
    """

    @staticmethod
    def forward(ctx: Any, slot: GradientSlot, phony: Tensor, value: Tensor) -> Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None]:
        if not ctx.slot.open:
            raise CrossingError(
                "a backward in the forward, or a second one after it, comes to where a tensor "
                "crossed from another stage, and its graph is cut there; use schedule='uncut', or "
                "detach() what the inner backward does not need (a loss function only returns its "
                "loss: forward_backward runs the backward)"
            )
        ctx.slot.gradient = gradient
        return None, None, None


# Makes entries differentiable, and gets no gradient itself. Its node is kept: to make one, anomaly
# mode asks for the interpreter while it has the leaf's lock, and two threads would wait for ever.
_phony = torch.zeros((), device="cpu", requires_grad=True)
_node_of_phony = get_gradient_edge(_phony).node


def enter_graph(slot: GradientSlot, value: Tensor) -> Tensor:
    """Return a value as an entry into this hop's graph; its gradient will be in the slot."""
    if torch.is_grad_enabled():
        return cast(Tensor, GraphEntry.apply(slot, _phony, value))
    # With grad also where the user's code is under no_grad: the copy is kept, and a later
    # reader may need the gradient.
    with torch.enable_grad():
        return cast(Tensor, GraphEntry.apply(slot, _phony, value))


def aliases_of(tensor: Tensor, key: MicrobatchKey) -> Aliases | None:
    """Return what a run knows of a tensor's storage."""
    storage = _storage(tensor)
    known = None if storage is None else getattr(storage, _ALIASES, None)
    return None if known is None else known.get(key)


def set_aliases(tensor: Tensor, key: MicrobatchKey, aliases: Aliases) -> None:
    """Note what a run knows of a tensor's storage. Slices of one batch share a storage and are no
    aliases, so this is kept for each run."""
    storage = _storage(tensor)
    if storage is None:
        return
    known = getattr(storage, _ALIASES, None)
    if known is None:
        known = WeakKeyDictionary()
        setattr(storage, _ALIASES, known)
    known[key] = aliases


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return a tensor's place in the autograd graph, whatever the grad mode is."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, PythonNode):
        return GradientEdge(node, tensor.output_nr)
    # A custom function's node does not keep its own graph alive: torch adds what does.
    # torch finds a leaf's place through a view of it: no read, but the sanitizer would see one.
    with copying(), torch.enable_grad():
        return get_gradient_edge(tensor)
