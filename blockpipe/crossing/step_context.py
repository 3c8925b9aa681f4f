"""What the runs of one step share: the homes, the devices, what is known of the forward, and values
that are copied once."""

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .._torch.tensors import memory_of
from ..devices.copies import PendingCopy, send
from ..devices.copy_lifetimes import CopySources, FinishedCopies
from ..devices.devices import is_asynchronous, mark
from ..devices.digests import Comparisons
from ..devices.observer import Observer, Watch
from ..devices.ownership import Owner, set_owner
from ..devices.rng_streams import Source
from .carried_values import CarriedValues
from .constants import Constants
from .recompute import RecomputeSpec
from .tags import TAG, ParameterHome, Tag
from .tensors.tensor_attributes import class_attributes, share_attributes


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The way in which the autograd graphs of a step are built.

    Attributes:
        differentiable: whether there are any.
        cut: whether they end at the borders of stages.
        split: whether their backwards may be in two parts.
    """

    differentiable: bool
    cut: bool = True
    split: bool = False


@dataclass(frozen=True)
class Seal:
    """The way in which a module or function is called where it is sealed.

    Attributes:
        name: its name in the recording.
        hops: those on which it is sealed.
        recompute: how it is recomputed; ``None``: it is not.
        waits: whether it makes the host wait for the device.
        constants: the indices of the tensors in its result that are constants.
    """

    name: str = ""
    hops: frozenset[int] = frozenset()
    recompute: RecomputeSpec | None = None
    waits: bool = False
    constants: Collection[int] = ()


@dataclass(frozen=True, kw_only=True)
class KnownForward:
    """The recording's knowledge of a forward, by which a step runs it.

    Attributes:
        marks: for each hop, how often marks moved the forward to each stage, from the hop before up
            to the one that began it.
        tracks_writes: whether the recording saw a write to a tensor of another hop.
        sealed_functions: by name.
        sealed_forwards: is entered again where a part of a forward is run again.
        waiting: names of torch functions that wait for a device.
        hops_rerunning_forward: hops with functions that may read twice what they saved.
        code_in_backward: hops in whose backward autograd calls code of the user's.
        written: the parameters and buffers that the forward writes to.
        number: of the cut.
        custom_functions: names of the custom functions that the recording met.
    """

    marks: Sequence[Mapping[int, int]] = ()
    tracks_writes: bool = True
    sealed_functions: Mapping[str, Seal] = field(default_factory=dict)
    sealed_forwards: AbstractContextManager[None] = field(default_factory=nullcontext)
    waiting: Collection[str] = ()
    hops_rerunning_forward: Collection[int] = ()
    code_in_backward: Collection[int] = ()
    written: Sequence[ParameterHome] = ()
    number: int = field(default_factory=itertools.count().__next__)
    custom_functions: Collection[str] = ()


class StepContext:
    """The shared part of a step's runs: the homes, the devices, and values copied once.

    Args:
        route: the stage of each hop.
        homes: where parameters and buffers live, by their ids.
        devices: the device of each stage; ``None`` where nothing is placed.
        graphs: how the step's graphs are built.
        known: what the recording has told of the forward.
        sources: what each hop draws random numbers from.
        isolate_as: the pipeline's number in the stage sanitizer's book; ``None`` without it.
        observer: is told of copies.
    """

    _numbers = iter(range(1 << 62))

    def __init__(
        self,
        route: list[int],
        homes: dict[int, ParameterHome],
        devices: list[torch.device] | None,
        graphs: Graphs,
        known: KnownForward,
        *,
        sources: Sequence[list[Source]] = (),
        isolate_as: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.number = next(StepContext._numbers)
        self.route = route
        self.homes = homes
        self.devices = devices
        self.graphs = graphs
        self.known = known
        self.sources = sources
        self.isolate_as = isolate_as
        self.isolate = isolate_as is not None
        self.observer = observer
        # Is told what torch keeps of each torch.utils.checkpoint that begins, and on which hop.
        self.on_checkpoint: Callable[[object, int], None] = lambda kept, hop: None
        self.comparisons: Comparisons | None = None  # of what a first step recomputes
        self.carried_values: CarriedValues | None = None  # that it must leave alone
        self.lent = CopySources()  # the caller's tensors, and the model's, that are being copied
        self.sent_back = CopySources()  # by hop: gradients that are on their way
        self.returned = FinishedCopies()
        # None: micro-batches come one after the other, and read what the plain loop's would.
        self.constants: Constants | None = None
        self._begun: dict[torch.device, torch.Event | None] = {}
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, int], PendingCopy] = {}
        # Of this step: not the model's, so not kept longer.
        self._adopted: dict[int, ParameterHome] = {}

    def device_of(self, stage: int) -> torch.device | None:
        """Return the device of a stage, or ``None`` where nothing is placed."""
        return None if self.devices is None else self.devices[stage]

    @cached_property
    def has_copies(self) -> bool:
        """Whether what crosses is copied between devices, some of which are asynchronous."""
        used = set() if self.devices is None else {self.devices[stage] for stage in self.route}
        return self.graphs.cut and len(used) > 1 and any(map(is_asynchronous, used))

    @cached_property
    def written_memory(self) -> dict[int, ParameterHome]:
        """What the forward writes to while other micro-batches are under way, by its memory."""
        if self.constants is None:
            return {}
        return {memory_of(home.tensor): home for home in self.known.written}

    @cached_property
    def is_mixed(self) -> bool:
        """Whether some stages are on the CPU, and some on an accelerator."""
        return len({device.type == "cpu" for device in self.devices or ()}) > 1

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host because the user's code wants it there.

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
        """Return what an observer has for a copy between hops; hop -1 is the caller."""
        if self.observer is None:
            return None
        return self.observer.watch(tensor, from_hop, to_hop, microbatch)

    def settle(self) -> None:
        """End the step: what it was given, and what it made, may be written and freed."""
        self.lent.settle_all()
        self.sent_back.settle_all()
        self.returned.settle_all()

    def begin(self) -> None:
        """Note what is queued on the devices by now, which is in front of all that the step was
        given."""
        if self.has_copies:
            assert self.devices is not None
            self._begun = {device: mark(device) for device in set(self.devices)}

    def mark(self, stage: int) -> torch.Event | None:
        """Return an event behind what is queued on a stage's device, if anybody could wait for
        it."""
        return mark(self.devices[stage]) if self.has_copies and self.devices is not None else None

    def copy_of(
        self, tensor: Tensor, stage: int, watch: Watch | None = None, *, on_host: bool = False
    ) -> Tensor:
        """Return a parameter's or buffer's value on another stage, copied once in the step."""
        key = id(tensor), stage
        with self._lock:
            sent = self._copies.get(key)
            if sent is None:
                sent = self._copies[key] = self.lend(tensor, stage, watch, on_host=on_host)
        return sent.receive()

    def copy_of_constant(self, tensor: Tensor, tag: Tag, stage: int, *, on_host: bool) -> Tensor:
        """Return a constant's values on another stage, copied once for as long as the constant
        lives. It may have been made in this step, so the copy begins when all is done that is
        queued by now."""
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
        """Return on a stage the values of a tensor that is the caller's, or the model's."""
        return self.lend(tensor, stage, watch).receive()

    def lend(
        self,
        tensor: Tensor,
        stage: int,
        watch: Watch | None = None,
        *,
        on_host: bool = False,
        is_new: bool = False,
    ) -> PendingCopy:
        """Begin to copy a tensor that is the caller's, or the model's, to a stage.

        Args:
            tensor: the tensor.
            stage: where it is read.
            watch: called at the moments of the copy.
            on_host: whether it stays on the host.
            is_new: whether the forward may have made it itself. The copy then begins when all is
                done that is queued by now, and not when what was queued before the step is.
        """
        after = None if is_new else self._begun.get(tensor.device)
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
        """Begin to copy a tensor's values to a stage; on the same device this makes an alias,
        unless stages are isolated. Tensors that the user's code keeps on the host stay there. See
        :func:`blockpipe.devices.copies.send`."""
        device = tensor.device if on_host else self.device_of(stage)
        sent = send(tensor, device, copy=self.isolate, after=after, back=back, watch=watch)
        if self.isolate_as is not None:
            set_owner(sent.value, Owner(self.isolate_as, stage))
        return sent

    def adopt(self, tensor: Tensor, hop: int, stage: int) -> ParameterHome:
        """Return a home, where it is read, for a leaf that no module registered and that needs a
        gradient.

        A parameter of a loss function, say.
        """
        with self._lock:
            home = ParameterHome(tensor, hop, stage, "<unregistered>", is_adopted=True)
            return self._adopted.setdefault(id(tensor), home)

    def adopted(self) -> list[ParameterHome]:
        """Return the leaves that were adopted, with the first hop that read each."""
        return [*self._adopted.values()]

    def home_of(self, tensor: Tensor) -> ParameterHome | None:
        """Return where a parameter or buffer lives; ``None`` for any other tensor."""
        return self.homes.get(id(tensor)) or self._adopted.get(id(tensor))
