"""Collect garbage that only cycles hold, at the least cost."""

import gc
import time
from collections.abc import Callable
from typing import Any

_ATTEMPTS = 500  # to collect, in 5 seconds
_YOUNG, _ALL = 1, 2  # generations of the collector


def collect_until(is_over: Callable[[], bool]) -> bool:
    """Collect what is young, and all the rest only if that was not enough.

    What a forward leaves in cycles is young. To look at all objects of the process takes a third of
    a second where models' libraries are imported.

    Args:
        is_over: whether enough is collected.

    Returns:
        Whether it is, in the end.
    """
    for generation in (_YOUNG, _ALL):
        _collect(generation)
        if is_over():
            return True
    return False


def _collect(generation: int) -> None:
    """Collect garbage; ``gc.collect()`` returns at once while another thread does it."""
    for _ in range(_ATTEMPTS):
        garbage: list[Any] = []
        garbage.append(garbage)
        del garbage
        if gc.collect(generation):
            return
        time.sleep(0.01)
