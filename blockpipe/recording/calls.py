"""The calls of a recorded forward, the segments between their beginnings, and what flows there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..costs.work import Work


@dataclass(eq=False)
class Call:
    """One call of a module, or of a :func:`BlockFunction`: its path, which of its calls, and where
    it ran.

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
    hop: int | None = None  # of its first operation; None: it did nothing
    last_hop: int | None = None
    sealed: bool = True
    parent: Call | None = field(default=None, repr=False)
    stage: int = 0
    under_way: bool = field(default=True, repr=False)
    is_function: bool = False
    checkpoint: bool | None = None  # what the mark in effect says
    draws: bool = False
    buffers: set[str] = field(default_factory=set, repr=False)  # that it reads or writes
    refuses: str | None = None  # why it cannot be run again
    saved_bytes: int = 0  # by autograd, in it, and by no earlier call of the hop
    flops: float = 0.0
    mark: str | None = None  # the line of the mark in effect; None: none, or a plan
    mark_name: str | None = None
    inbound: list[Call] = field(default_factory=list, repr=False)  # that made its arguments
    is_recomputed: bool = False  # where recomputation is on: it is sealed, and that gains something
    work: dict[int, Work] = field(default_factory=dict, repr=False)  # by stage
    outputs: list[tuple[int, ...]] = field(default_factory=list, repr=False)  # shapes of tensors
    opened: str | None = None  # why it is not sealed
    waits: bool = False  # for a device: a tensor's value is asked for in it
    constants: set[int] = field(default_factory=set, repr=False)  # those of the tensors it returns
    transforms: bool = field(default=False, repr=False)  # an operation is in a torch.func transform

    @property
    def is_module(self) -> bool:
        """Whether a plan can assign it: a module inside of the model."""
        return bool(self.path) and not self.is_function

    @property
    def hops(self) -> range:
        """The hops from its first operation to its last; none if it did nothing."""
        if self.hop is None:
            return range(0)
        return range(self.hop, (self.hop if self.last_hop is None else self.last_hop) + 1)

    def recomputes(self, mode: bool) -> bool:
        """Return whether it is recomputed, where the pipeline recomputes or where it does not."""
        return self.is_recomputed and (mode if self.checkpoint is None else self.checkpoint)

    def ancestors(self) -> Iterator[Call]:
        """Yield the calls around it, from the inside out."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    def open(self, why: str) -> None:
        """Note that it is not sealed; the first reason counts."""
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
