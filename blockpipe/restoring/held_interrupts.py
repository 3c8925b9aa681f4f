"""Hold an interrupt (Ctrl-C) back until it can be raised without harm.

Python raises a ``KeyboardInterrupt`` between any two of its instructions. While a forward is
recorded, some of these run in the middle of torch's C++ code, which asks Python about fake tensors
and cannot always pass an exception on: the process would abort. To ignore signals during a
recording was no alternative, because a recording may take minutes.
"""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable
from typing import Any

_Handler = Callable[[int, types.FrameType | None], Any]


class HeldInterrupts:
    """While entered, an interrupt of the main thread waits for :meth:`check`, or for the end.

    A second one goes through at once. In other threads, and where Python does not handle the
    signal, this does nothing. It may be nested.

    Raises:
        KeyboardInterrupt: at the end, if one waits. If the user has a handler of the signal, that
            is called instead.
    """

    def __init__(self) -> None:
        self._handler: _Handler | None = None  # the user's, or Python's own
        self._waiting: tuple[int, types.FrameType | None] | None = None

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *failure: object) -> None:
        # The forward may have set a handler of its own.
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._interrupted:
            signal.signal(signal.SIGINT, self._handler)
        self.check()

    def check(self) -> None:
        """Let an interrupt through that waits; called where nothing is half done."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            assert self._handler is not None
            self._handler(*waiting)

    def _interrupted(self, number: int, frame: types.FrameType | None) -> None:
        if self._waiting is None:
            self._waiting = number, frame
        else:
            self.check()
