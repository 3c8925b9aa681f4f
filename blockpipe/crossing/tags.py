"""What a crossing is made of: tags, imports, entries into a hop's graph, homes; and the step.

What is known of a tensor is kept on the tensor (:class:`Tag`), and what is known of a storage on
the storage (:class:`Aliases`): both die with what they describe, and neither refers back to it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch.graph import PythonNode
from .._torch.tensors import version_of
from ..devices.copies import PendingCopy, send
from ..devices.copy_lifetimes import CopySources, FinishedCopies
from ..devices.devices import is_asynchronous, mark
from ..devices.digests import Comparisons
from ..devices.observer import Observer, Watch
from ..devices.ownership import Owner, copying, set_owner
from ..devices.rng_streams import Source
from ..errors import CrossingError
from .constants import Constants, is_written
from .tensor_attributes import class_attributes, share_attributes

TAG = "_blockpipe_tag"
RECORDING = -1  # the number of the recording's step
_ALIASES = "_blockpipe_aliases"
UNCUT = (
    "use schedule='uncut' (one ordinary graph, one micro-batch at a time), "
    "or put both operations on one stage"
)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class MicrobatchKey:
    """Which run a tensor belongs to; compared by identity, printed in errors."""

    step: int
    microbatch: int


class Tag:
    """What a tensor is to a run: whose, made on which hop, where it was imported to."""

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
        """Whether its tensor was computed from nothing of a micro-batch's, and not written to
        since: see :mod:`blockpipe.crossing.constants`."""
        if self.constant is None or self.constant != version_of(tensor):
            return False
        return not tensor.is_inference() or not is_written(tensor)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Import:
    """A tensor's copy on a hop, and whether it is an entry of that hop's graph."""

    value: Tensor
    is_entry: bool
    version: int
    aliases: Aliases | None = None
    besides: Collection[str] = ()  # attributes of the value that are its class's

    def share_attributes(self, tensor: Tensor) -> None:
        """What is set on the tensor is on its copy, too."""
        share_attributes(tensor, self.value, self.besides)

    def return_attributes(self, tensor: Tensor) -> None:
        """What was set on the copy is on the tensor, too."""
        share_attributes(self.value, tensor, self.besides)


class Aliases:
    """What shares a storage, across its copies: how many were imported, where it was written."""

    __slots__ = ("imported", "written_on")

    def __init__(self) -> None:
        self.imported = 0
        self.written_on: int | None = None


@dataclass(slots=True)
class ParameterHome:
    """Where a parameter or buffer lives. It holds the tensor, so that its id stays its own."""

    tensor: Tensor
    hop: int
    stage: int
    name: str
    is_adopted: bool = False  # a leaf from outside, which no module of the model registered


@dataclass(slots=True)
class GradientSlot:
    """Where a gradient arrives, while its hop's backward runs; closed at any other time."""

    gradient: Tensor | None = None
    open: bool = False


@dataclass(slots=True)
class Crossing:
    """One import's way back: the gradient arrives in the box and goes to an edge of a hop."""

    entry: GradientEdge | None  # where it arrives; kept only where backwards are split
    slot: GradientSlot
    to_hop: int
    to_edge: GradientEdge
    on_host: bool = False  # the tensor is on the host wherever it is read, and so its gradient


@dataclass(slots=True)
class HopGraph:
    """What a hop's backward starts from, and what it hands on."""

    roots: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list)
    arriving: list[PendingCopy] = field(default_factory=list)  # of the roots' gradients
    crossings: list[Crossing] = field(default_factory=list)


class GraphEntry(torch.autograd.Function):
    """Where a crossing enters a hop's graph: keeps the gradient, and nothing of the data.

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
                "detach() what the inner backward does not need"
            )
        ctx.slot.gradient = gradient
        return None, None, None


# Makes entries differentiable, and gets no gradient itself.
_phony = torch.zeros((), device="cpu", requires_grad=True)


class StepContext:
    """What the runs of one step share: the homes, the devices, and values copied once."""

    _numbers = iter(range(1 << 62))

    def __init__(
        self,
        route: list[int],
        homes: dict[int, ParameterHome],
        devices: list[torch.device] | None,
        *,
        differentiable: bool,
        isolate_as: int | None = None,
        cut: bool = True,
        begins: Sequence[int] = (),
        splits: bool = False,
        tracks_writes: bool = True,
        sealed_functions: Mapping[str, tuple[frozenset[int], Any, bool, Collection[int]]]
        | None = None,
        sealed_forwards: AbstractContextManager[None] | None = None,
        sources: Sequence[list[Source]] = (),
        waiting: Collection[str] = (),
        hops_rerunning_forward: Collection[int] = (),
        custom_functions: Collection[str] = (),
        is_first: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.number = next(StepContext._numbers)
        self.route = route
        self.begins = begins  # for each hop, which of the forward's marks it began with
        self.splits = splits  # whether backwards may be in two parts
        self.tracks_writes = tracks_writes  # whether the recording saw a write to a foreign tensor
        # By name: on which hops it is sealed, how it is recomputed, whether the host waits in it,
        # and which of its results are constants.
        self.sealed_functions = sealed_functions or {}
        self.sealed_forwards = (
            sealed_forwards or nullcontext()
        )  # entered again where a part of a forward is run again
        self.sources = sources  # what each hop draws random numbers from
        self.waiting = waiting  # names of torch functions that wait for a device
        self.hops_rerunning_forward = (
            hops_rerunning_forward  # hops with functions that may read what they saved twice
        )
        self.custom_functions = custom_functions  # names of those that the recording met
        self.is_first = is_first  # of a recording
        self.comparisons = Comparisons() if is_first else None  # of what is recomputed
        self.observer = observer
        self.homes = homes
        self.devices = devices
        self.differentiable = differentiable
        self.isolate_as = isolate_as  # the pipeline's number in the sanitizer's book
        self.isolate = isolate_as is not None
        self.cut = cut
        self.lent = CopySources()  # the caller's tensors, and the model's, that are being copied
        self.sent_back = CopySources()  # by hop: gradients that are on their way
        self.returned = FinishedCopies()
        # None: micro-batches come one after the other, and read what the plain loop's would.
        self.constants: Constants | None = None
        self._begun: dict[torch.device, torch.Event | None] = {}
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, int], PendingCopy] = {}
        self._adopted: dict[
            int, ParameterHome
        ] = {}  # of this step: not the model's, so not kept longer

    def device_of(self, stage: int) -> torch.device | None:
        """The device of a stage, or ``None`` where nothing is placed."""
        return None if self.devices is None else self.devices[stage]

    @cached_property
    def has_copies(self) -> bool:
        """Whether what crosses is copied between devices, some of which are asynchronous."""
        used = set() if self.devices is None else {self.devices[stage] for stage in self.route}
        return self.cut and len(used) > 1 and any(map(is_asynchronous, used))

    @cached_property
    def is_mixed(self) -> bool:
        """Whether some stages are on the CPU, and some on an accelerator."""
        return len({device.type == "cpu" for device in self.devices or ()}) > 1

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host because the user's code wants it there.

        A tensor that a model on one accelerator finds on the host is on the host in a pipeline too:
        results that an accelerator's stage has on the host, and tensors from outside of the
        forward. Parameters, buffers, inputs, and what a stage on the CPU computes follow the
        forward.
        """
        if tensor.device.type != "cpu":
            return False
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None:
            made_on = self.device_of(tag.stage)
            return tag.is_kept or (made_on is not None and made_on.type != "cpu")
        home = self.home_of(tensor)
        return home is None or home.is_adopted

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch | None:
        """What an observer has for a copy between hops (-1: the caller)."""
        if self.observer is None:
            return None
        return self.observer.watch(tensor, from_hop, to_hop, microbatch)

    def settle(self) -> None:
        """The step is over: what it was given, and what it made, may be written and let go."""
        self.lent.settle_all()
        self.sent_back.settle_all()
        self.returned.settle_all()

    def begin(self) -> None:
        """Note what is queued on the devices by now: what the step is given is there behind it."""
        if self.has_copies:
            assert self.devices is not None
            self._begun = {device: mark(device) for device in set(self.devices)}

    def mark(self, stage: int) -> torch.Event | None:
        """An event behind what is queued on a stage's device, if anybody could wait for it."""
        return mark(self.devices[stage]) if self.has_copies and self.devices is not None else None

    def copy_of(
        self, tensor: Tensor, stage: int, watch: Watch | None = None, *, on_host: bool = False
    ) -> Tensor:
        """A parameter's or buffer's value on another stage, copied once in the step."""
        key = id(tensor), stage
        with self._lock:
            sent = self._copies.get(key)
            if sent is None:
                sent = self._copies[key] = self.lend(tensor, stage, watch, on_host=on_host)
        return sent.receive()

    def copy_of_constant(self, tensor: Tensor, tag: Tag, stage: int, *, on_host: bool) -> Tensor:
        """A constant's values on another stage, copied once for as long as it lives. It may have
        been made in this step: the copy begins when all is done that is queued by now."""
        device = tensor.device if on_host else self.device_of(stage)
        key = device, (self.isolate_as, stage) if self.isolate else None
        with self._lock:
            tag.copies = tag.copies or {}
            sent = tag.copies.get(key)
            if sent is None:
                sent = self.send(tensor, stage, on_host=on_host)
                self.lent.add(None, sent)
                if sent.arrived is None or (device is not None and is_asynchronous(device)):
                    tag.copies[key] = sent  # else each reader waits for a copy of its own
        return sent.receive()

    def carried(self, tensor: Tensor, stage: int, watch: Watch | None = None) -> Tensor:
        """The values of a tensor that is the caller's, or the model's, on a stage."""
        return self.lend(tensor, stage, watch).receive()

    def lend(
        self, tensor: Tensor, stage: int, watch: Watch | None = None, *, on_host: bool = False
    ) -> PendingCopy:
        """Begin to copy a tensor that is the caller's, or the model's, to a stage."""
        after = self._begun.get(tensor.device)
        sent = self.send(tensor, stage, watch=watch, after=after, on_host=on_host)
        share_attributes(tensor, sent.value, class_attributes(sent.value))
        self.lent.add(None, sent)
        return sent

    def send(
        self,
        tensor: Tensor,
        stage: int,
        *,
        after: torch.Event | None = None,
        back: bool = False,
        watch: Watch | None = None,
        on_host: bool = False,
    ) -> PendingCopy:
        """Begin to copy a tensor's values to a stage: an alias on the same device, unless isolated.
        What the user's code keeps on the host stays there. See
        :func:`blockpipe.devices.copies.send`."""
        device = tensor.device if on_host else self.device_of(stage)
        sent = send(tensor, device, copy=self.isolate, after=after, back=back, watch=watch)
        if self.isolate_as is not None:
            set_owner(sent.value, Owner(self.isolate_as, stage))
        return sent

    def adopt(self, tensor: Tensor, hop: int, stage: int) -> ParameterHome:
        """A leaf that no module registered and that needs a gradient: its home is where it is read.

        A parameter of a loss function, say.
        """
        with self._lock:
            home = ParameterHome(tensor, hop, stage, "<unregistered>", is_adopted=True)
            return self._adopted.setdefault(id(tensor), home)

    def home_of(self, tensor: Tensor) -> ParameterHome | None:
        """Where a parameter or buffer lives; ``None`` for any other tensor."""
        return self.homes.get(id(tensor)) or self._adopted.get(id(tensor))


def enter_graph(slot: GradientSlot, value: Tensor) -> Tensor:
    """A value as an entry into this hop's graph; its gradient will be in the box."""
    if torch.is_grad_enabled():
        return cast(Tensor, GraphEntry.apply(slot, _phony, value))
    # With grad also where the user's code is under no_grad: the copy is kept, and a later
    # reader may need the gradient.
    with torch.enable_grad():
        return cast(Tensor, GraphEntry.apply(slot, _phony, value))


def aliases_of(tensor: Tensor, key: MicrobatchKey) -> Aliases | None:
    """What a run knows of a tensor's storage."""
    storage = _storage(tensor)
    known = None if storage is None else getattr(storage, _ALIASES, None)
    return None if known is None else known.get(key)


def set_aliases(tensor: Tensor, key: MicrobatchKey, aliases: Aliases) -> None:
    """Note it, by run: slices of one batch share a storage, and are no aliases."""
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
    """A tensor's place in the autograd graph, whatever grad mode is, and however its stage."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, PythonNode):
        return GradientEdge(node, tensor.output_nr)
    # A custom function's node does not keep its own graph alive: torch adds what does.
    # torch finds a leaf's place through a view of it: no read, but the sanitizer would see one.
    with copying(), torch.enable_grad():
        return get_gradient_edge(tensor)
