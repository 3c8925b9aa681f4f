"""The entries of a recording's lists: hops, tensors, crossings, outputs, and changes of state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..costs.work import Work
from .calls import Call


@dataclass
class ActivationBytes:
    """The bytes that a hop keeps of one micro-batch between its forward and its backward.

    Attributes:
        bytes: the bytes of all tensors that it keeps.
        shared: the part of ``bytes`` that an earlier hop keeps as well; it counts once if both are
            on one device.
        inputs: the part of ``bytes`` that belongs to the micro-batch's inputs, which the caller's
            batch holds already if it is on the same device.
        full: the bytes that it keeps after recomputation.
        largest: the bytes of its few largest storages.
        calls: the number of calls that are recomputed.
        recompute: the work of recomputation.
    """

    bytes: int = 0
    shared: int = 0
    inputs: int = 0
    full: int = 0
    largest: tuple[int, ...] = ()
    calls: int = 0
    recompute: Work = field(default_factory=Work)


@dataclass
class Hop:
    """One unbroken visit of the forward to a stage. Costs are those of one micro-batch.

    Attributes:
        index: its place in the route, from 0.
        stage: the stage.
        name: the name of the block that begins it, if it has one.
        where: the line of the mark that begins it.
        begun_by: the call with which a plan begins it; ``None`` if a mark does.
        marks: how often marks, from the hop before up to the one that begins it, moved the forward
            to each stage; blocks in which nothing runs have marks, and no hop.
        operations: the number of torch functions that its forward calls.
        kernels: the number of operations below autograd, except views.
        flops: the floating-point operations of its forward.
        work: the work of its forward and backward, by kind.
        largest_bytes: the bytes of the largest result of an operation.
        glue_bytes: the bytes that it keeps outside of sealed calls, which are never recomputed.
        never: the bytes that it keeps without recomputation.
        asked: the bytes that it keeps if the calls that marks ask for are recomputed.
        always: the bytes that it keeps if all calls are recomputed that marks do not exempt.
        weight_bytes: the bytes of gradients between the two parts of a split backward.
        draws: the random generators that it draws from: ``"torch"``, ``"random"``, ``"numpy"``.
        reruns_forward: whether its backward may run forward code (``torch.utils.checkpoint``).
        whole: the reason why its backward is not split in two parts; ``None`` if it can be.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> [(hop.stage, hop.operations) for hop in recording.hops]
        [(0, 1), (1, 1)]
    """

    index: int
    stage: int
    name: str | None
    where: str
    begun_by: str | None = None
    marks: dict[int, int] = field(default_factory=dict)
    operations: int = 0
    kernels: int = 0
    flops: float = 0.0
    work: Work = field(default_factory=Work)
    largest_bytes: int = 0
    glue_bytes: int = 0
    never: ActivationBytes = field(default_factory=ActivationBytes)
    asked: ActivationBytes = field(default_factory=ActivationBytes)
    always: ActivationBytes = field(default_factory=ActivationBytes)
    weight_bytes: int = 0
    draws: set[str] = field(default_factory=set)
    reruns_forward: bool = False
    whole: str | None = None


@dataclass
class TensorInfo:
    """A parameter or buffer: all its names, its size, and the hops that read it.

    Attributes:
        names: all names in the model; tied ones have several.
        shape: the shape.
        dtype: the dtype, such as ``"float32"``.
        bytes: the bytes of its values.
        elements: the number of its elements.
        trainable: whether it needs a gradient.
        is_buffer: whether it is a buffer.
        stage: the stage that it lives on.
        hop: the first hop that reads it; ``None`` if none does.
        hops: all hops that read it.
        also_read_on: the other stages that read it.
        written: whether the forward writes to it in place.
        where: the line that reads it first.
        view_read: the line that reads a view of it on another hop than the view's; empty: none.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> weight = recording.parameters[0]
        >>> weight.name, weight.shape, weight.stage
        ('0.weight', (4, 4), 0)
    """

    names: list[str]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    elements: int
    trainable: bool
    is_buffer: bool
    stage: int = 0
    hop: int | None = None
    hops: list[int] = field(default_factory=list)
    also_read_on: list[int] = field(default_factory=list)
    written: bool = False
    where: str = ""
    view_read: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclass
class OutsideTensor:
    """A tensor that no module registered and no forward made, such as one in a global.

    Attributes:
        shape: the shape.
        where: the line that reads it first.
        tensor: a weak reference, because a recording keeps no tensor alive.
        hops: all hops that read it or write to it.
        written: whether the forward writes to it in place.
    """

    shape: tuple[int, ...]
    where: str
    tensor: weakref.ref[Tensor] | None = field(repr=False, compare=False)
    hops: list[int] = field(default_factory=list)
    written: bool = False

    @property
    def name(self) -> str:
        """A description of the tensor."""
        return f"a tensor of shape {self.shape} that no module registered"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tensor": None}


@dataclass
class CrossingInfo:
    """A tensor that is read on another hop than the one that it was made on, or lives on.

    Attributes:
        from_hop: the hop that it comes from.
        to_hop: the hop that reads it.
        from_stage: the stage of ``from_hop``.
        to_stage: the stage of ``to_hop``.
        shape: the shape, for one micro-batch.
        dtype: the dtype, such as ``"float32"``.
        bytes: the bytes that are copied for one micro-batch.
        needs_grad: whether a gradient goes back.
        what: the name of a parameter or buffer; ``None`` for other tensors.
        where: the line that reads it.
        reader: the innermost call that reads it.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> crossing = recording.crossings[0]
        >>> crossing.from_stage, crossing.to_stage, crossing.shape
        (0, 1, (8, 4))
    """

    from_hop: int
    to_hop: int
    from_stage: int
    to_stage: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    needs_grad: bool
    what: str | None
    where: str
    reader: Call | None = field(default=None, repr=False, compare=False)


@dataclass
class Output:
    """A tensor that the forward returns.

    Attributes:
        name: its place in the result: ``"output 1"``, ``"output 'logits'"``.
        shape: the shape, for one micro-batch.
        dtype: the dtype, such as ``"float32"``.
        is_loss: whether it is the model's own loss.
        is_given: whether it is a parameter, a buffer or an argument, and so the same tensor for all
            micro-batches.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_loss: bool = False
    is_given: bool = False


@dataclass
class Unmarked:
    """Operations that belong to no mark: before the first, or after an outermost block's end.

    Attributes:
        stage: the stage that they run on.
        where: the line of the first of them.
        operations: their number.
        after: the line of the block that ended before them; ``None`` before the first mark.

    Example:
        >>> import torch, blockpipe as bp
        >>> class Net(torch.nn.Module):
        ...     def forward(self, x):
        ...         x = x + 1
        ...         with bp.Block(stage=1):
        ...             return x * 2
        >>> [(found.stage, found.operations) for found in bp.record(Net(), torch.zeros(8)).unmarked]
        [(0, 1)]
    """

    stage: int
    where: str
    operations: int
    after: str | None


def note_unmarked(found: list[Unmarked], stage: int, where: str, after: str | None) -> None:
    """Count an operation that belongs to no mark.

    Args:
        found: the entries so far; the last one counts it if it is about the same place.
        stage: the stage that it is on.
        where: its line.
        after: the line of the block that ended before it.
    """
    last = found[-1] if found else None
    if last is not None and last.stage == stage and last.after == after:
        last.operations += 1
    else:
        found.append(Unmarked(stage, where, 1, after))


@dataclass
class GeneratorUse:
    """A generator of the user that the forward draws from.

    Attributes:
        hops: the hops that draw from it, seed it or ask for its state.
        where: the line of the first draw, or of the first seed without one.
        how: what they do with it, in words.
    """

    hops: list[int]
    where: str
    how: str = "drawn from"


@dataclass
class SharedChange:
    """A change that the forward makes while it runs and that several hops see.

    Attributes:
        what: the name of the changed object.
        seen: a phrase that says how the hops see it.
        hops: the hops that see it.
        where: the line of the change.
        remedy: the remedy for an error.
        settles: whether it is harmless if the next forward does not change it again.
        is_traced: whether all code that sets it is seen, also where the value stays the same.
        schedule: the schedule under which it is harmless.
        place: the id of the object that is set, and the name or key in it, if that is known.
    """

    what: str
    seen: str
    hops: list[int]
    where: str
    remedy: str
    settles: bool = False
    is_traced: bool = False
    schedule: str = "sequential"
    place: tuple[int, Any] | None = field(default=None, repr=False, compare=False)


@dataclass
class LateBackward:
    """Something that the forward does in the plain loop's way only if the backwards of earlier
    micro-batches are over by then.

    Attributes:
        what: what the forward does, and where.
        needs: what such a backward does with it.
        hop: the hop whose forward does it.
        backwards: the hops whose backwards it is about.
        remedy: the remedy for an error.
        compared: the name of the parameter or buffer whose values say in the first step whether it
            matters; ``None``: it matters whenever such a backward is late.
        written: the name of the parameter or buffer that it is about.
        settles: whether it is harmless if the next forward does not do it again.
        sample: the shape and the dtype of what autograd saves.
    """

    what: str
    needs: str
    hop: int
    backwards: list[int]
    remedy: str
    compared: str | None = None
    written: str | None = None
    settles: bool = False
    sample: tuple[torch.Size, torch.dtype] | None = None


@dataclass
class CarriedValue:
    """A plain value that each forward leaves for the next one.

    Attributes:
        name: its name.
        where: the line that reads it.
        hops: the hops that set it.
        place: the id of what it is in, and the name or key in that (``None``: its content).
    """

    name: str
    where: str
    hops: list[int]
    place: tuple[int, Any] = field(repr=False, compare=False)


@dataclass
class _InObject:
    """What an object of the user's has.

    Attributes:
        owner: returns the object, or ``None`` if that is gone. A copy has no function.
    """

    owner: Callable[[], Any] | None = field(repr=False, compare=False)

    @property
    def object(self) -> Any:
        """The object, or ``None`` if that is gone."""
        return None if self.owner is None else self.owner()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"owner": None}


@dataclass
class TurningValue(_InObject):
    """A place that one hop writes to and another one reads. A tensor in it says which micro-batch
    it is of, if an operation is given it; whether there is one, nobody says.

    Attributes:
        key: the name or key in its object.
        name: its name for messages.
        where: the line that reads it.
        hops: those that write to it, and those that read it behind them.
    """

    key: Any = field(repr=False, compare=False)
    name: str
    where: str
    hops: list[int]


@dataclass
class UsedAttribute(_InObject):
    """An attribute that the forward sets or reads.

    Attributes:
        key: its name in its object; ``None``: any.
        name: its name for messages.
        where: the line that reads it, or else sets it; empty where code of libraries does.
        read_early: the stages whose forwards read it.
        set_early: those whose forwards set it.
        read_late: those whose backwards read it.
        set_late: those whose backwards set it.
        said_on: those that print or log it.
        counted_on: those that read it only to update it.
    """

    key: str | None
    name: str
    where: str
    read_early: set[int] = field(default_factory=set)
    set_early: set[int] = field(default_factory=set)
    read_late: set[int] = field(default_factory=set)
    set_late: set[int] = field(default_factory=set)
    said_on: set[int] = field(default_factory=set)
    counted_on: set[int] = field(default_factory=set)

    @property
    def read_on(self) -> set[int]:
        """The stages that read it."""
        return self.read_early | self.read_late

    @property
    def set_on(self) -> set[int]:
        """The stages that set it."""
        return self.set_early | self.set_late

    @property
    def used_on(self) -> set[int]:
        """The stages that read it or set it."""
        return self.read_on | self.set_on

    @property
    def place(self) -> tuple[int, str | None]:
        """The id of its object, and its name."""
        return id(self.object), self.key
