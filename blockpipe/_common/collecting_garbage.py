"""Tell the forward's own code from what Python runs while it collects garbage: the functions in
``gc.callbacks`` and finalizers. When that is, is chance."""

import gc
import threading
from typing import Any


class CollectingGarbage:
    """Notice, while entered, which threads collect garbage."""

    def __init__(self) -> None:
        self._threads = set[int]()

    @property
    def now(self) -> bool:
        """Whether this thread collects garbage."""
        return bool(self._threads) and threading.get_ident() in self._threads

    def __enter__(self) -> None:
        gc.callbacks.append(self._ends)  # first: garbage may be collected right here
        gc.callbacks.insert(0, self._begins)

    def __exit__(self, *_: object) -> None:
        for callback in (self._begins, self._ends):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def _begins(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._threads.add(threading.get_ident())

    def _ends(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "stop":
            self._threads.discard(threading.get_ident())
