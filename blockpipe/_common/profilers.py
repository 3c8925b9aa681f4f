"""Look at the calls of a thread, also where a profiler does: Python has room for one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def calls_seen_by(called: Callable[[types.FrameType, str, Any], object]) -> Iterator[bool]:
    """Have a function called as ``sys.setprofile`` does, in a block. The user's profiler is told of
    the calls as well if it is written in Python; cProfile pauses.

    Yields:
        Whether the function sees the calls. It does not if another profiler in C is on, which could
        not be put back.
    """
    before: Any = sys.getprofile()

    def both(frame: types.FrameType, event: str, argument: Any) -> None:
        called(frame, event, argument)
        before(frame, event, argument)

    pauses = type(before).__module__ in ("cProfile", "_lsprof")
    if not (before is None or pauses or callable(before)):
        yield False
        return
    if pauses:
        before.disable()
    ours = both if callable(before) else called
    sys.setprofile(ours)
    try:
        yield True
    finally:
        if sys.getprofile() is ours:  # and none that began in the block
            sys.setprofile(None if pauses else before)
            if pauses:
                before.enable()
