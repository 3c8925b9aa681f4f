"""Follow the loops of code that runs from one hop to the next, and find what iterators run over."""

import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ....restoring.iterators import is_iterator
from ..syntax.accesses import Access, looked_into_again, names_bound

_NOTHING: dict[str, object] = {}
_VIEWS_OF_DICT = (type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
_MOST_NESTED, _MOST_INSIDE = 4, 64  # of iterators over iterators: guesses


class RunTurn(NamedTuple):
    """A turn of a loop that is over.

    Attributes:
        bound: what the function's variables stood for, by id; not tensors.
        hops: the hop of each instruction, by offset: the last one until then.
    """

    bound: Mapping[str, int]
    hops: Mapping[int, int]


class Loops:
    """The turns of loops that have run, and the hops on which they took their last elements."""

    def __init__(self) -> None:
        self._turns: dict[int, list[RunTurn]] = {}  # by frame
        self._hops: dict[tuple[int, int], int] = {}  # by frame and instruction
        self._known: dict[int, tuple[types.CodeType, Mapping[int, Sequence[Access]]]] = {}  # by id

    def goes_on(
        self, frame: types.FrameType, hop: Callable[[], int], hops: Mapping[int, int]
    ) -> Sequence[Access]:
        """Return what the loop at an instruction looks into for its next element; nothing if it
        has taken the last one on the same hop, or if there is no loop.

        Args:
            frame: the running frame.
            hop: returns the hop.
            hops: the hops of the frame's instructions until now.
        """
        code = frame.f_code
        if (known := self._known.get(id(code))) is None:  # to hash a code takes long
            known = self._known[id(code)] = code, looked_into_again(code)
        if (looks_into := known[1].get(frame.f_lasti)) is None:
            return ()
        names, known_now = names_bound(code), frame.f_locals
        now = {n: known_now[n] for n in names if n in known_now}
        bound = {name: id(value) for name, value in now.items() if not isinstance(value, Tensor)}
        turns = self._turns.setdefault(id(frame), [])
        is_same = bool(turns) and turns[-1].hops == hops  # long loops stay on one hop
        turns.append(RunTurn(bound, turns[-1].hops if is_same else dict(hops)))
        at, here = (id(frame), frame.f_lasti), hop()
        before, self._hops[at] = self._hops.get(at), here
        return () if before == here else looks_into

    def ended(self, frame: types.FrameType) -> list[RunTurn]:
        """Return the turns that have run in a frame that is over."""
        return self._turns.pop(id(frame), [])


def hop_before(offset: int, hops: Mapping[int, int]) -> int:
    """Return the hop of the last instruction before another one that has run."""
    return hops[max(known for known in hops if known < offset)]


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
