"""Follow the loops of code that runs from one hop to the next, and find what iterators run over."""

import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....restoring.iterators import is_iterator
from ..syntax.accesses import Access, looked_into_again

_NOTHING: dict[str, object] = {}
_VIEWS_OF_DICT = (type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
_MOST_NESTED, _MOST_INSIDE = 4, 64  # of iterators over iterators: guesses


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


def run_over(value: Any) -> Iterator[Any]:
    """Yield the objects that an iterator of Python's looks into when it goes on, or that a view of
    a dictionary shows: containers, and other iterators."""
    level = [value] if _is_lazy(value) else []
    for _ in range(_MOST_NESTED):
        level = [one for lazy in level for one in gc.get_referents(lazy)[:_MOST_INSIDE]]
        level += [one for several in level if type(several) is tuple for one in several]  # zip's
        yield from level
        level = [one for one in level if _is_lazy(one)]


def _is_lazy(value: Any) -> bool:
    """Return whether it is such an iterator, or view. The code of a generator is seen itself."""
    is_own = isinstance(value, types.GeneratorType | types.CoroutineType)
    return type(value) in _VIEWS_OF_DICT or (is_iterator(value) and not is_own)
