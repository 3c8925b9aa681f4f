"""Changes to what every thread sees, in place as long as any thread has them entered.

Who has entered them is a list and no count, and a thread says that it enters before it does: so an
interrupt in the middle leaves nothing that could not be put right (:func:`leave_changes`).
"""

import threading
from contextlib import suppress
from typing import Any

from .thread_state import in_thread

_lock = threading.RLock()


class ProcessChange:
    """A change that any number of threads enter; the last one to leave takes it off."""

    _threads: tuple[int, ...] = ()  # that have it entered: once for each time

    def put_on(self) -> None:
        """Make the change."""
        raise NotImplementedError

    def take_off(self) -> None:
        """Undo it, as far as it was made."""
        raise NotImplementedError

    def __enter__(self) -> None:
        with _lock:
            in_thread.entered.append(self)
            self._hold(in_thread.entered.count(self))

    def __exit__(self, *failure: Any) -> None:
        with _lock:
            if self not in in_thread.entered:
                return  # after an interrupt: it has been left
            self._hold(in_thread.entered.count(self) - 1)
            in_thread.entered.remove(self)

    def _hold(self, times: int) -> None:
        """Set how many times this thread has it entered."""
        own = threading.get_ident()
        others = [t for t in self._threads if t != own]
        threads = (*others, *(own,) * times)
        if not threads:
            self.take_off()
        elif not self._threads:
            self.put_on()
        self._threads = threads


def leave_changes(first: int) -> None:
    """Leave what this thread has entered and not left, but for the first so many."""
    with _lock:
        for shared in in_thread.entered[first:]:
            shared._hold(in_thread.entered[:first].count(shared))
        del in_thread.entered[first:]
    # An interrupt after the body of a ``with``, and before its end, keeps the lock.
    with suppress(RuntimeError):  # this thread has it no longer
        while True:
            _lock.release()
