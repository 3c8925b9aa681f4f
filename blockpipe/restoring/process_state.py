"""Save and restore the process's output streams and warning filters.

A forward may change them for a while with ``redirect_stdout`` and ``catch_warnings``, which restore
what they found. If several threads are in them at once, the last one to leave restores another
thread's setting, and everything that the program prints later is lost.
"""

import sys
import warnings
from typing import Any


def process_state() -> tuple[Any, ...]:
    """Return the process's output streams and warning filters."""
    return sys.stdout, sys.stderr, tuple(warnings.filters)


class kept_process_state:  # noqa: N801 - a context manager that reads as a participle
    """Restore the process's output streams and warning filters at the end of a block.

    It is used only for forwards that were seen to change them, because another thread of the user
    may change them on purpose.
    """

    def __enter__(self) -> None:
        self._before = process_state()

    def __exit__(self, *failure: object) -> None:
        if process_state() == self._before:
            return
        sys.stdout, sys.stderr, filters = self._before
        warnings.filters[:] = filters  # type: ignore[index]
        with warnings.catch_warnings():
            pass  # it invalidates caches of the filters
