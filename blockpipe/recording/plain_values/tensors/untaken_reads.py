"""What branches that were not taken would read of other hops, whatever their conditions are.

A tensor says which micro-batch it is of where its operations are seen. So calls that leave one, or
may read one in another forward, have to be looked into.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ...calls import Call
from ..evaluation.expressions import Frame
from ..evaluation.members import UNKNOWN
from ..known_values import KnownValues
from ..places import has_tensors
from ..still_code import StillFrame
from ..syntax.accesses import Access, accesses_of
from ..values import hops_of
from .tensor_uses import ForwardsTensors
from .used_tensors import uses_of

_Read = tuple[int, Call | None]  # the hop and the innermost call


class UntakenReads:
    """The reads in such branches of one forward.

    Args:
        known: the values that the forward has read and set.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known = known
        self._places: list[tuple[Any, Any, _Read]] = []
        self._tensors: list[tuple[Tensor, _Read]] = []

    def note(self, accesses: Iterable[Access], frame: Frame, read: _Read) -> None:
        """Note what an instruction would read.

        Args:
            accesses: its accesses.
            frame: the frame that it is in, which may be over, or never run.
            read: the hop, and the innermost call, that the frame was in.
        """
        for access in accesses:
            if access.is_said or not access.reads:
                continue
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                owner, key, _ = frame.owner_of(access)
                if owner is not None and key is not UNKNOWN:
                    self._places.append((owner, key, read))
                self._tensors += ((use.tensor, read) for use in uses_of(access, frame) if use.reads)

    def note_still(self, still: StillFrame, read: _Read) -> None:
        """Note what a function would read that such a branch calls."""
        for accesses in accesses_of(still.f_code).values():
            self.note(accesses, Frame(still, {}, None), read)  # type: ignore[arg-type]

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
