"""The calls of a recorded forward, the segments between their beginnings, and what flows there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..costs.work import Work

UNRETURNED = "it makes a tensor that it does not return"


@dataclass(eq=False)
class Call:
    """One call of a module, or of a function under :func:`BlockFunction`.

    Attributes:
        path: the module's path, or the function's name and line.
        kind: the name of the module's class.
        call: the index of the call among those of ``path``, from 0.
        depth: the number of calls around it.
        where: the user's line that calls.
        hop: the hop of its first operation; ``None`` if it has none.
        last_hop: the hop of its last operation; ``None`` if that is ``hop``.
        sealed: whether it stays on one stage and reads other stages' tensors only as arguments.
        parent: the call around it.
        stage: the stage on which it begins.
        under_way: whether it has not ended yet.
        is_function: whether it is a call of a function.
        checkpoint: the ``checkpoint=`` of the mark in effect; ``None`` without one.
        draws: whether it draws random numbers.
        buffers: the names of the buffers that it reads or writes.
        refuses: the reason why it cannot be recomputed; ``None`` if it can.
        saved_bytes: the bytes that autograd saves in it, without those of earlier calls of the hop.
        flops: the floating-point operations of its forward, for one micro-batch.
        mark: the line of the mark in effect; ``None`` without one, or with a plan.
        mark_name: the name of that mark's block.
        inbound: the calls that made its arguments.
        is_recomputed: whether it is recomputed where recomputation is on.
        work: its work by stage, for one micro-batch.
        outputs: the shapes of the tensors that it returns.
        opened: the reason why it is not sealed; ``None`` if it is.
        leaves_to: the stages that read tensors which it has made and does not return.
        waits: whether it makes the host wait for a tensor's value.
        constants: the indices of the tensors it returns that every micro-batch may read.
        transforms: whether an operation in it runs in a ``torch.func`` transform.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> call = recording.calls[1]
        >>> call.path, call.kind, call.stage, call.sealed
        ('0', 'Linear', 0, True)
    """

    path: str
    kind: str
    call: int
    depth: int
    where: str
    hop: int | None = None
    last_hop: int | None = None
    sealed: bool = True
    parent: Call | None = field(default=None, repr=False)
    stage: int = 0
    under_way: bool = field(default=True, repr=False)
    is_function: bool = False
    checkpoint: bool | None = None
    draws: bool = False
    buffers: set[str] = field(default_factory=set, repr=False)
    refuses: str | None = None
    saved_bytes: int = 0
    flops: float = 0.0
    mark: str | None = None
    mark_name: str | None = None
    inbound: list[Call] = field(default_factory=list, repr=False)
    is_recomputed: bool = False
    work: dict[int, Work] = field(default_factory=dict, repr=False)
    outputs: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    opened: str | None = None
    leaves_to: set[int] = field(default_factory=set, repr=False)
    waits: bool = False
    constants: set[int] = field(default_factory=set, repr=False)
    transforms: bool = field(default=False, repr=False)

    @property
    def is_module(self) -> bool:
        """Whether a plan can assign it: a module inside of the model."""
        return bool(self.path) and not self.is_function

    @property
    def is_left_on_its_stage(self) -> bool:
        """Whether it is not sealed only because its own stage reads such a tensor."""
        is_why = (self.opened or "").startswith(UNRETURNED)
        return is_why and self.leaves_to <= {self.stage}

    @property
    def hops(self) -> range:
        """The hops from its first operation to its last; none if it did nothing."""
        if self.hop is None:
            return range(0)
        return range(self.hop, (self.hop if self.last_hop is None else self.last_hop) + 1)

    def recomputes(self, mode: bool) -> bool:
        """Return whether it is recomputed.

        Args:
            mode: whether the pipeline recomputes calls without a ``checkpoint=`` of their own.
        """
        return self.is_recomputed and (mode if self.checkpoint is None else self.checkpoint)

    def ancestors(self) -> Iterator[Call]:
        """Yield the calls around it, from the inside out."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    def open(self, why: str) -> None:
        """Note that it is not sealed.

        Args:
            why: the reason; the first one is kept.
        """
        self.sealed = False
        self.opened = self.opened or why


def hops_by_path(calls: Iterable[Call], *, starts: bool = False) -> dict[str, set[int]]:
    """Return the hops on which each module or function runs; one that does nothing is left out.

    Args:
        calls: the calls of a recording.
        starts: count only the hop on which each call starts, not those that it goes on to.
    """
    found: dict[str, set[int]] = {}
    for call in calls:
        if call.hop is not None:
            found.setdefault(call.path, set()).update([call.hop] if starts else call.hops)
    return found


@dataclass
class Segment:
    """The operations from the beginning of one call to that of the next: the least that a stage can
    be.

    Calls that begin without an operation between them begin one segment together.
    """

    index: int
    calls: list[int] = field(default_factory=list)  # that begin with it: indices, outermost first
    why_not: str | None = None  # why no stage can begin with it
    operations: int = 0
    kernels: int = 0
    flops: float = 0.0
    work: Work = field(default_factory=Work)
    largest_bytes: int = 0
    held: list[str] = field(default_factory=list)  # names of parameters and buffers that it reads


@dataclass
class Saved:
    """The bytes that autograd saves in the same segments."""

    segments: tuple[int, ...]  # ascending
    bytes: int
    is_input: bool = False  # a part of the micro-batch


@dataclass
class Flow:
    """A tensor that is made in one segment and read in later ones."""

    made: int
    read: list[int]  # ascending
    bytes: int
    needs_grad: bool
