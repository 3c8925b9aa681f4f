"""One thread at a time works with a model: recordings and steps put doors on its modules.

Calls of pipelines that share a module take turns, in the order in which they come. A lock in each
pipeline would not do: two of them may share an encoder, and ``record`` needs no pipeline.

Recordings take turns in the whole process, whatever their models are: torch keeps in globals, for
all threads, whether compiled functions run as they were written and whether a dispatch mode is
entered, and puts back what it has found. Two threads at once would leave each other's. They take
turns with the steps of other models, too, which run at the same time: a recording puts back what
its forward can reach, and with that what another model's forward counts there meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import UsageError
from ..callsite import users_line
from .standstill import PATIENCE, Gate, Standstill

_lock = threading.RLock()
_entered: "list[alone_with]" = []  # those who work and those who wait, as they came
_recorded = nn.Module()  # stands for what all recordings share
_stepped = nn.Module()  # stands for what a step shares with recordings, and not with steps


class alone_with:  # noqa: N801 - a context manager that reads as an adverb
    """While entered, no other thread's call works with these modules. A thread may enter it again.

    Args:
        model: the model with these modules.

    Raises:
        UsageError: another thread's call has them, and has stopped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._gate = Gate()
        self._has_turn = False

    def __enter__(self) -> None:
        with _lock:
            _entered.append(self)
        try:
            if self._has_to_wait():
                self._wait()
            self._has_turn = True
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *failure: Any) -> None:
        self._leave()

    def _wait(self) -> None:
        where, standstill = users_line(), Standstill()
        while self._has_to_wait():
            self._gate.wait()
            if standstill.is_reached():
                raise UsageError(
                    f"{self._who()} take turns, but this one waits for a call of "
                    f"another thread, and for {PATIENCE:.0f} seconds nothing has run: that one "
                    f"seems to wait for this one ({where}); in a loss or a hook, do not wait for a "
                    "thread that calls a pipeline of the same modules: call it before the step"
                )

    def _has_to_wait(self) -> bool:
        with _lock:
            if not _are_others():
                return False
            ours = [e for e in _entered if e is not self and e._is_ours()]
            if any(e._model is self._model or e._shares(self._model) for e in ours):
                return False  # it is this thread's turn already
            earlier = _entered[: _entered.index(self)]
            return any(not e._is_ours() and e._shares(self._model) for e in earlier)

    def _is_ours(self) -> bool:
        return self._thread == threading.get_ident()

    def _shares(self, model: nn.Module) -> bool:
        if self._model is _stepped or model is _stepped:
            return self._model is _recorded or model is _recorded
        return self._model is model or not set(self._model.modules()).isdisjoint(model.modules())

    def _who(self) -> str:
        is_recorded = self._model is _recorded or self._model is _stepped
        return "recordings and steps" if is_recorded else "calls that share modules"

    def _leave(self) -> None:
        with _lock:
            if self in _entered:
                _entered.remove(self)
            for waiting in _entered:
                waiting._gate.open()


@contextmanager
def alone_recording(model: nn.Module) -> Iterator[None]:
    """Be :class:`alone_with` a model, and the only thread that records."""
    with alone_with(model), alone_with(_recorded):
        yield


def alone_stepping() -> alone_with:
    """While entered, no other thread records."""
    return alone_with(_stepped)


def is_recorded_elsewhere(module: nn.Module) -> bool:
    """Return whether another thread records a model that has this module."""
    with _lock:
        turn = next((entered for entered in _entered if entered._model is _recorded), None)
        if turn is None or turn._is_ours() or not turn._has_turn:
            return False
        theirs = (e for e in _entered if e._thread == turn._thread and e is not turn)
        return any(module in entered._model.modules() for entered in theirs)


def _are_others() -> bool:
    return any(not entered._is_ours() for entered in _entered)


def how_often_entered() -> int:
    """Return the number of turns that this thread has entered and not left."""
    return sum(entered._is_ours() for entered in _entered)


def leave_modules(first: int) -> None:
    """Leave what this thread has entered and not left, but for the first so many."""
    with _lock:
        for entered in [e for e in _entered if e._is_ours()][first:]:
            entered._leave()
