"""What of the process a forward may change for a while, and no number depends on.

``redirect_stdout`` and ``catch_warnings`` put back what they found. Of several threads in them at
once the last one puts back what another has set, and all that the program prints later is gone.
"""

import sys
import warnings
from typing import Any


def process_state() -> tuple[Any, ...]:
    """Where the process prints to, and its filters of warnings."""
    return sys.stdout, sys.stderr, tuple(warnings.filters)


class kept_process_state:  # noqa: N801 - a context manager that reads as a participle
    """At the end, the process prints to where it did before, and warns of what it did.

    Only for forwards that were seen to change it: another thread of the user's may as well.
    """

    def __enter__(self) -> None:
        self._before = process_state()

    def __exit__(self, *failure: object) -> None:
        if process_state() == self._before:
            return
        sys.stdout, sys.stderr, filters = self._before
        warnings.filters[:] = filters  # type: ignore[index]
        with warnings.catch_warnings():
            pass  # it tells what has remembered the filters
