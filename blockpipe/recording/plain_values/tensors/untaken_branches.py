"""What branches that were not taken would read and write, whatever their conditions are.

A tensor says which micro-batch it is of where its operations are seen. So calls that leave one, or
may read one in another forward, have to be looked into. And if a step has written something by a
branch that no recording takes, the source says on which hops that may be.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ...._torch.modules import within
from ....restoring.contents import is_generator
from ...calls import Call
from ..evaluation.expressions import Frame
from ..evaluation.members import ALL, UNKNOWN
from ..evaluation.still_frames import StillFrame
from ..known_values import KnownValues
from ..places import has_tensors, space_of
from ..syntax.accesses import Access, accesses_of
from ..syntax.uses import Use
from ..values import SharedValue, hops_of
from .tensor_uses import ForwardsTensors
from .used_tensors import statistics_of, uses_of

_Read = tuple[int, Call | None]  # the hop and the innermost call


class UntakenBranches:
    """The reads and writes in such branches of one forward.

    Args:
        known: the values that the forward has read and set.

    Attributes:
        sets: the hops that may set the value at a place, by its object's id and its key.
        calls_late: the hops on which functions may be handed to autograd.
        reruns: those on which a branch, or the loss, has a checkpoint.
        lasts: says whether a tensor outlives the forward.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known = known
        self.lasts: Callable[[Tensor], bool] = lambda tensor: False
        self.sets = defaultdict[tuple[int, Any], set[int]](set)
        self.calls_late, self.reruns = set[int](), set[int]()
        self._written = list[tuple[Tensor, int, str]]()
        self._places: list[tuple[Any, Any, _Read]] = []
        self._tensors: list[tuple[Tensor, _Read]] = []

    def note(self, accesses: Iterable[Access], frame: Frame, read: _Read) -> None:
        """Note what an instruction would read or write.

        Args:
            accesses: its accesses.
            frame: the frame that it is in, which may be over, or never run.
            read: the hop, and the innermost call, that the frame was in.
        """
        for access in accesses:
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                owner, key, _ = frame.owner_of(access)
                if access.is_said:
                    if owner is not None and key is not UNKNOWN:
                        self._known.at(owner, key).said_on.add(read[0])
                    continue
                if owner is not None and key is not UNKNOWN:
                    if access.reads:
                        self._places.append((owner, key, read))
                    if access.writes or access.use.changes:
                        self.sets[space_of(owner), None if key is ALL else key].add(read[0])
                if access.use is not Use.NONE and is_generator(
                    value := frame.evaluated(access.node)
                ):
                    self.sets[space_of(value), None].add(read[0])
                uses = [*uses_of(access, frame, self.lasts)]
                self._tensors += ((use.tensor, read) for use in uses if use.reads)
                line = frame.line_of(access.node)
                self._written += ((use.tensor, read[0], line) for use in uses if use.writes)

    def note_still(self, still: StillFrame, read: _Read) -> None:
        """Note what a function would do that such a branch calls."""
        for accesses in accesses_of(still.f_code).values():
            self.note(accesses, Frame(still, {}, None), read)  # type: ignore[arg-type]

    def runs_again(self, functions: Iterable[Any], hop: int) -> None:
        """Note what checkpoints are given on a hop. What a norm in it learns once more, nobody can
        tell before."""
        for function in functions:
            inner = within(function) if isinstance(function, nn.Module) else ()
            if not any(module.training and statistics_of(module) for module in inner):
                self.reruns.add(hop)

    def may_write(self) -> Iterable[tuple[Tensor, int, str]]:
        """Return the tensors that may be written, with the hop and the line; also statistics of
        modules of which the forward sets the mode."""
        for known in self._modes():
            for tensor in statistics_of(known.owner):
                self._written += ((tensor, hop, known.first_write) for hop in known.set_on)
        return self._written

    def may_read_late(self) -> Iterator[Tensor]:
        """Yield the statistics of modules to which the forward gives one mode or the other: in
        evaluation the backward reads them, too."""
        turned = (known.owner for known in self._modes() if known.set_on and not known.is_fixed)
        yield from (tensor for module in turned for tensor in statistics_of(module))

    def _modes(self) -> Iterator[SharedValue]:
        for known, _, _ in self._known.each():
            if known.key == "training" and isinstance(known.owner, nn.Module):
                yield known

    def calls(self, forward: ForwardsTensors) -> Iterator[Call]:
        """Yield the calls that have to be looked into.

        Args:
            forward: tells what the forward does with tensors.
        """
        for owner, key, (hop, call) in self._places:
            known = self._known.found_at(owner, key)
            if known is None or not {*hops_of(known.set_on)} - {hop}:
                continue
            if has_tensors(self._known.value_of(known)):
                found = (call, *(setter for setter, _ in known.set_in))
                yield from (one for one in found if one is not None)
        for tensor, (hop, call) in self._tensors:
            _, info, is_written = forward.told(tensor)
            if call is not None and is_written and info is not None and {*info.hops} - {hop}:
                yield call

    def writes(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors that may be written, each with the hop."""
        yield from ((tensor, hop) for tensor, hop, _ in self._written)
