"""Find what a forward does to memory that the backward of an earlier micro-batch still needs.

The plain loop runs a micro-batch's backward before the next one's forward; most schedules do not.
If a forward writes to a tensor that autograd has saved, autograd itself notices that by the
tensor's version. A write through ``.data`` counts no version, code that runs in the backward
compares none, and a forward that reads ``.grad`` writes nothing at all. So these are written down
here, and a step whose schedule runs such a backward later than the plain loop does is refused. To
refuse them in the recording was no alternative, because the last stage of 1F1B has the plain loop's
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...._common.callsite import users_line
from ...._common.garbage import collect_until
from ...._common.nested import tensors
from ...._torch.modes import without_torch_functions
from ....crossing.tags import TAG, Tag
from ...entries import LateBackward, TensorInfo
from .crossed_memory import CrossedMemory
from .lasting_memory import LastingMemory, MemoryPart
from .late_reads import LateRead, LateReads
from .uses_inside import UsesInside

_CLONE = "clone() it before it is used, write it between steps"
_INITIALIZE = (
    "if the first forward alone writes it, as an initialization, write it under torch.no_grad() "
    "(p.copy_(…), not p.data.copy_(…)) or run the plain model once before the pipeline"
)
_READ = "read it between steps"
_UNCOUNTED = ", by .data or in another way that counts no version"


@dataclass
class _Write:
    """A write of the forward.

    Attributes:
        place: of the memory, if it was written to.
        leaf: the tensor that was given other memory instead.
        hop: the hop that writes.
        where: the line that writes.
        is_again: whether a checkpoint will run it again, which a step notices.
        is_norms: whether a normalization updates running statistics, which counts no version.
        depends: whether what is written was computed from the micro-batch.
        counts: whether the versions of the memory's tensors count it.
        is_rare: whether a branch would do it that the forward did not take.
    """

    place: MemoryPart | None
    leaf: Tensor | None
    hop: int
    where: str
    is_again: bool
    is_norms: bool = False
    depends: bool = False
    counts: bool = False
    is_rare: bool = False

    def reaches(self, read: LateRead) -> bool:
        """Return whether a backward reads what is written here."""
        is_of_norms = (self.is_norms or self.is_rare) and read.is_norms
        if (self.is_again and read.is_again) or is_of_norms:
            return False
        if self.place is None:
            return read.leaf == id(self.leaf)
        return self.place.overlaps(read.place)


class LateBackwards:
    """Watch one forward for such writes and reads.

    Args:
        held: the parameters and buffers by id.
        memory: of all tensors that outlive the forward.
        reads: what backwards read of it.
        hop: returns the hop that the forward is on.
        wrote: is told of each tensor whose memory was written to without a new version.

    Attributes:
        crossed: the memory of what has crossed in the first of two runs.
        inside: watches the uses that no torch function shows.
    """

    def __init__(
        self,
        held: Mapping[int, TensorInfo],
        memory: LastingMemory,
        reads: LateReads,
        hop: Callable[[], int],
        wrote: Callable[[Tensor], None],
    ) -> None:
        self._held, self._hop, self._wrote = held, hop, wrote
        self.memory, self.reads = memory, reads
        self.crossed: CrossedMemory
        self.inside: UsesInside
        self._pending: list[_Write] = []
        self._writes: list[_Write] = []
        self._statistics: set[int] = set()  # ids of what the operation under way updates
        self._gradients: dict[int, tuple[TensorInfo, str, int, str]] = {}  # by id

    # --- below autograd

    def updates(self, tensor: Tensor) -> list[Tensor]:
        """Note that a normalization updates a running statistic; return it, or, for another hop's
        alias, the tensors that it is one of."""
        with without_torch_functions():
            write = self._write_to(tensor)
        if write is not None:
            write.is_norms = write.depends = True
            self._writes.append(write)
            self.reads.updates(write.place)
        self._statistics.add(id(tensor))
        return [tensor] if write is None else self.memory.behind(tensor)

    def reading(self, operands: Iterable[Tensor]) -> None:
        """Note what an operation reads. That is not the statistics that it updates."""
        self.reads.operands(tensor for tensor in operands if id(tensor) not in self._statistics)
        self._statistics.clear()

    def writing(self, written: Iterable[Tensor]) -> None:
        """Note, before an operation, the tensors that it will write to."""
        self._pending += filter(None, map(self._write_to, written))

    def _write_to(self, tensor: Tensor) -> _Write | None:
        place = self.memory.place_of(tensor)
        return None if place is None else _Write(place, None, *self._here())

    def _here(self) -> tuple[int, str, bool]:
        return max(self._hop(), 0), users_line(), self.reads.reruns()

    # --- torch functions

    def operated(self, given: Any = ()) -> None:
        """Look at the end of a torch function which of its writes no version has counted.

        Args:
            given: its arguments.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        depends = any(map(_is_of_microbatch, tensors(given)))
        for write in pending:
            assert write.place is not None
            uncounted = self.memory.uncounted(write.place)
            write.depends, write.counts = depends, not uncounted
            self._writes.append(write)
            for tensor in uncounted:
                self._wrote(tensor)

    def assigned(self, tensor: Tensor, value: object) -> None:
        """Note that the forward gives a tensor other memory."""
        if not self.memory.knows(tensor):
            return  # the micro-batch's own
        self._wrote(tensor)
        depends = isinstance(value, Tensor) and _is_of_microbatch(value)
        self._writes.append(_Write(None, tensor, *self._here(), depends=depends))
        self.memory.add(tensor)

    def may_write(self, tensor: Tensor, hop: int, where: str) -> None:
        """Note that a branch which the forward did not take writes to a tensor.

        Args:
            tensor: the tensor.
            hop: the hop that the branch is on.
            where: the line that writes.
        """
        if (place := self.memory.place_by_code(tensor)) is not None:
            self._writes.append(_Write(place, None, max(hop, 0), where, False, is_rare=True))

    def uses_gradient(self, tensor: Tensor, how: str) -> None:
        """Note that the forward ``"reads"`` or ``"sets"`` the ``.grad`` of a tensor."""
        held = self._held.get(id(tensor))
        if held is not None and held.trainable:
            self._gradients.setdefault(id(tensor), (held, how, max(self._hop(), 0), users_line()))

    # --- the result

    def found(self) -> Iterator[LateBackward]:
        """Yield what was noted, at the end of the forward, while its graph is there."""
        self.operated()
        if self._met(_is_unnoticed):
            collect_until(lambda: not self._met(_is_unnoticed))  # a graph that a cycle alone holds
        known: dict[str, LateBackward] = {}
        for write, reads in self._met(_is_unnoticed):
            name, late = self._described(write, reads)
            if write.is_rare and (late.compared is None or self._is_written(write)):
                continue  # nobody can compare it, or the forward does so in any case
            if name not in known or (known[name].compared and not late.compared):
                known[name] = late
        yield from known.values()
        for held, how, hop, where in self._gradients.values():
            name = f"the .grad of parameter {held.name!r}"
            yield LateBackward(
                f"the forward {how} {name} on hop {hop} ({where})",
                "has its gradient in the plain loop",
                hop,
                [*held.hops] or [hop],
                _READ,
            )

    def _is_written(self, rare: _Write) -> bool:
        """Whether the forward itself writes to the memory that a branch may write to."""
        places = (write.place for write in self._writes if not write.is_rare)
        own = rare.place
        return own is not None and any(one is not None and own.overlaps(one) for one in places)

    def found_if_packed(self) -> Iterator[LateBackward]:
        """Yield the writes that autograd notices, unless hooks around the step keep what it would
        have saved."""
        for write, reads in self._met(_is_noticed):
            late = self._described(write, reads)[1]
            late.sample = reads[0].sample
            yield late

    def _met(self, counts: Callable[[_Write, bool], bool]) -> list[tuple[_Write, list[LateRead]]]:
        """Return the writes to what backwards read, with the reads.

        Args:
            counts: says of a write whether it counts, given whether autograd compares versions.
        """
        reads: dict[int | None, list[tuple[LateRead, bool]]] = {}
        for read in self.reads.found():
            found = read, self.reads.is_checked(read)
            reads.setdefault(read.place.key, []).append(found)
            reads.setdefault(None, []).append(found)
        met = []
        for write in self._writes:
            known = reads.get(None if write.place is None else write.place.key, ())
            these = [read for read, is_checked in known if counts(write, is_checked)]
            if these := [read for read in these if write.reaches(read)]:
                met.append((write, these))
        return met

    def _described(self, write: _Write, reads: list[LateRead]) -> tuple[str, LateBackward]:
        """Return the name of what is written, and what is wrong."""
        name, named = self.memory.named(write.place, write.leaf)
        is_hidden = not (write.counts or write.is_norms or write.is_rare)
        late = LateBackward(
            f"the forward {'may write' if write.is_rare else 'writes'} to {name} on hop {write.hop}"
            f" ({write.where})"
            f"{_UNCOUNTED if is_hidden else ''}",
            f"{reads[0].needs} ({reads[0].where})",
            write.hop,
            sorted({read.hop for read in reads}),
            f"{_CLONE}, {_INITIALIZE}" if is_hidden and named is not None else _CLONE,
            None if write.depends else named,
            named,
            settles=write.counts,
        )
        return name, late

    def forget(self) -> None:
        """Release all tensors, and end the cycle with what is told of writes."""
        self._hop, self._wrote = int, _nothing
        self.memory.forget()
        self.crossed.stay += self.inside.forget()
        self.reads.forget()
        self._writes.clear()


def _is_unnoticed(write: _Write, is_checked: bool) -> bool:
    return not (write.counts and is_checked)


def _is_noticed(write: _Write, is_checked: bool) -> bool:
    return write.counts and is_checked


def _nothing(_: Tensor) -> None:
    """Be told no more."""


def _is_of_microbatch(tensor: Tensor) -> bool:
    with without_torch_functions():
        tag: Tag | None = getattr(tensor, TAG, None)
        return tag is not None and not tag.is_constant(tensor)
