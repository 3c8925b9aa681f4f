"""Tell the forward's own code from what Python runs while it collects garbage: the functions in
``gc.callbacks`` and finalizers. When that is, is chance."""

import gc
import threading
from typing import Any


class CollectingGarbage:
    """Notice, while entered, when this thread collects garbage.

    Attributes:
        now: whether it does.
    """

    def __init__(self) -> None:
        self.now = False
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        gc.callbacks.append(self._ends)  # first: garbage may be collected right here
        gc.callbacks.insert(0, self._begins)

    def __exit__(self, *_: object) -> None:
        for callback in (self._begins, self._ends):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def _begins(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start" and threading.get_ident() == self._thread:
            self.now = True

    def _ends(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "stop" and threading.get_ident() == self._thread:
            self.now = False
