"""Notice that a thread which a forward has started fails while the forward is recorded.

Its tensors are fake, so it may fail for that reason alone (``float(h.mean())``), and nobody hears
of it: Python prints a thread's error and goes on. Here the error becomes the recording's, which is
then made by a real run.
"""

from __future__ import annotations

import threading
from typing import Any


class FailedThreads:
    """While entered, keep the first error of a thread that was started meanwhile, and raise it at
    the end; other threads' errors go where they went."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        self._known = {thread.ident for thread in threading.enumerate()}
        self._before = threading.excepthook
        self._hook = self._note  # one object, to be found again
        threading.excepthook = self._hook

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        if threading.excepthook is self._hook:
            threading.excepthook = self._before
        error, self._error = self._error, None
        if error is not None and kind is None:
            raise error

    def _note(self, failed: Any) -> None:
        if failed.thread is None or failed.thread.ident in self._known:
            self._before(failed)
        else:
            self._error = self._error or failed.exc_value
