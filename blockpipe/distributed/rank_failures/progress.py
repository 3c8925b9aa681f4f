"""What a process is doing: for those that wait for it, and for the error if it fails."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_FRAMES = 12  # of a stack that is shown to others
_EXPECTED = 2  # tensors that are named where more are waited for


class ProcessProgress:
    """What this process is doing now.

    It is written by the thread that runs the step, and read by the one that watches.

    Attributes:
        count: a number that grows with all that is begun or done.
        is_inside: whether a step, or something else that processes do together, is under way.
        is_lost: whether it has failed because of another process.
        failure: the error of this process's own code.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_inside = False
        self.is_lost = False
        self.failure: Exception | None = None
        self._computes = ""
        self._last = "nothing"
        self._expected: dict[Hashable, str] = {}
        self._since = time.monotonic()
        self._thread = threading.get_ident()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around what processes do together."""
        self._thread = threading.get_ident()
        self._expected.clear()
        self.done("the start")
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False
            self.done("the end of a step")

    @contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """Around code that waits for no other process: an error in it is this process's own."""
        self._computes = what
        self._count()
        try:
            yield
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._computes = ""
            self.done(what)

    def goes_on(self, what: str) -> None:
        """Note what this thread computes now, in the midst of what :meth:`computing` is around."""
        self._thread = threading.get_ident()
        self._computes = what
        self._count()

    def done(self, what: str) -> None:
        """Note what was done last."""
        self._last = what
        self._count()

    def expects(self, key: Hashable, what: str) -> None:
        """Note a tensor that this process is going to wait for."""
        self._expected[key] = what
        self._count()

    def has(self, key: Hashable) -> None:
        """Note that a tensor has arrived."""
        self._expected.pop(key, None)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another process."""
        return self.is_inside and not self._computes

    def __str__(self) -> str:
        computes, expected = self._computes, list(self._expected.values())
        if not self.is_inside:
            found = "is outside of a step"
        elif computes:
            found = f"is in {computes}"
        else:
            found = f"waits after {self._last}"
            if expected:
                found += f" for {' and '.join(expected[:_EXPECTED])}"
        return f"{found}, for {time.monotonic() - self._since:.0f} s"

    def stack(self) -> str:
        """The stack of the thread that runs the steps."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""

    def _count(self) -> None:
        self.count += 1
        self._since = time.monotonic()
