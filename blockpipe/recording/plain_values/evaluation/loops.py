"""Follow the loops of code that runs from one hop to the next."""

import types
from collections.abc import Callable, Mapping, Sequence

from ..syntax.accesses import Access, looked_into_again


class Loops:
    """The hops on which loops took their last elements."""

    def __init__(self) -> None:
        self._hops: dict[tuple[int, int], int] = {}  # by frame and instruction
        self._known: dict[int, tuple[types.CodeType, Mapping[int, Sequence[Access]]]] = {}  # by id

    def goes_on(self, frame: types.FrameType, hop: Callable[[], int]) -> Sequence[Access]:
        """Return what the loop at an instruction looks into for its next element; nothing if it
        has taken the last one on the same hop, or if there is no loop.

        Args:
            frame: the running frame.
            hop: returns the hop.
        """
        code = frame.f_code
        if (known := self._known.get(id(code))) is None:  # to hash a code takes long
            known = self._known[id(code)] = code, looked_into_again(code)
        if (looks_into := known[1].get(frame.f_lasti)) is None:
            return ()
        at, here = (id(frame), frame.f_lasti), hop()
        before, self._hops[at] = self._hops.get(at), here
        return () if before == here else looks_into
