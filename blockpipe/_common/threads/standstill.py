"""Whether a wait for another thread can end: it cannot if that thread waits for this one.

A lock of the user's, or a loss that waits for a thread which calls another pipeline, can close a
circle of waits, and nothing sees the user's part of it. But in such a circle nobody computes. So a
wait ends with an error where the whole process has used no processor time to speak of for a while.
A bound on the time alone was no alternative: a long step is no circle.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

POLL = 0.2  # seconds between two looks
PATIENCE = 60.0  # seconds without work before a wait is given up; a guess
_SHARE = 0.02  # of a core: what threads that only wait and look now and then may use
_RLOCK = type(threading.RLock())
_DEBUGGERS = frozenset(["bdb", "pdb", "pydevd"])


class Gate:
    """Wakes one who waits at it. Who is missed looks again after ``POLL``.

    A ``threading.Condition`` was no alternative: an interrupt may come in its Python code, and
    leave its lock to a thread that has gone on.
    """

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()

    def wait(self) -> None:
        """Wait until it is opened, or for ``POLL`` seconds."""
        self._shut.acquire(timeout=POLL)

    def open(self) -> None:
        """Let one waiter through: the present one, or the next."""
        with suppress(RuntimeError):  # it is open
            self._shut.release()


class Standstill:
    """Counts the time for which the process has computed nothing, for a waiter that polls it."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._looks, self._used = 0, time.process_time()

    def is_reached(self) -> bool:
        """Return whether nothing was computed for ``PATIENCE`` seconds; asked after each ``POLL``.

        Looks are counted, and not seconds: a process that was stopped for a minute has not waited.
        """
        self._looks += 1
        if time.process_time() - self._used > _SHARE * PATIENCE:
            self._begin()
        if self._looks * POLL < PATIENCE:
            return False
        self._looks = 0
        return not _is_debugged()


def _is_debugged() -> bool:
    """Return whether a thread is in a debugger, which waits for the user's input."""
    frames: dict[int, FrameType] = sys._current_frames()
    frames[threading.get_ident()] = sys._getframe(1)  # our own would hold itself
    frame: FrameType | None
    for frame in frames.values():
        while frame is not None:
            if frame.f_globals.get("__name__") in _DEBUGGERS:
                return True
            frame = frame.f_back
    return False


def names_lock_of(thread: int, holder: int) -> bool:
    """Return whether the code that a thread is in names a reentrant lock that another thread holds.

    Args:
        thread: the thread, by its identifier.
        holder: the other one.
    """
    frame = sys._current_frames().get(thread)
    return frame is not None and any(_is_held(value, holder) for value in _named_in(frame))


def _named_in(frame: FrameType) -> Iterator[Any]:
    """Yield the values of a frame's variables, and those of their attributes that it names."""
    names = frame.f_code.co_names
    variables = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in names)]
    for value in variables:
        yield value
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from (attributes[name] for name in names if name in attributes)


def _is_held(value: object, holder: int) -> bool:
    lock = getattr(value, "_lock", None) if isinstance(value, threading.Condition) else value
    return isinstance(lock, _RLOCK) and f"owner={holder} " in repr(lock)
