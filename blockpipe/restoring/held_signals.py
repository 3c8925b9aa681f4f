"""Hold signals back until their handlers can run without harm.

Python calls the handlers in the main thread, between any two of its instructions. While a forward
is recorded, some of these run in the middle of torch's C++ code, which asks Python about fake
tensors and cannot always pass a ``KeyboardInterrupt`` on: the process would abort. And what the
user's handler sets (``stop = True``) would be put back with what the forward sets. To ignore
signals during a recording was no alternative, because a recording may take minutes.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = (signal.SIGINT, *(signal.valid_signals() - {signal.SIGINT}))


def _runs_whole(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate what no interrupt may cut short while :class:`HeldSignals` is entered."""

    @functools.wraps(call)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(*args, **kwargs)

    return whole


_WHOLE = _runs_whole(print).__code__


def _is_whole(frame: FrameType | None) -> bool:
    # Asked of the frames, because a function that notes it could be interrupted before it does.
    while frame is not None and frame.f_code is not _WHOLE:
        frame = frame.f_back
    return frame is not None


class HeldSignals:
    """While entered, signals wait whose handlers Python would call in the main thread.

    The user's handlers are called at the end, in the order of the signals, each as often as its
    signal came. An interrupt, which Python's own handler raises, is let through by :meth:`check`; a
    second one goes through at once. In other threads this does nothing. It may be nested.

    Args:
        interruptible: whether interrupts go through at once, but for what runs whole.

    Raises:
        KeyboardInterrupt: at the end, if one waits.
    """

    def __init__(self, *, interruptible: bool = False) -> None:
        self._interruptible = interruptible
        self._handlers: dict[int, _Handler] = {}  # the user's, or Python's own
        self._waiting: list[int] = []
        self._is_over = False

    @_runs_whole
    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._is_over = False
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._came:
                    self._handlers[number] = handler
                    signal.signal(number, self._came)
        except BaseException:  # of a handler of the user's that was not replaced yet
            self._end()
            raise
        return self

    @_runs_whole
    def __exit__(self, *failure: object) -> None:
        self._end()

    def check(self) -> None:
        """Let an interrupt through that waits; called where nothing is half done."""
        for number in [n for n in self._waiting if self._interrupts(n)]:
            self._waiting.remove(number)
            self._handlers[number](number, sys._getframe())

    def _end(self) -> None:
        try:
            for number in reversed(self._handlers):
                # The forward may have set a handler of its own.
                if signal.getsignal(number) == self._came:
                    signal.signal(number, self._handlers[number])
        finally:
            self._is_over = True
            waiting, self._waiting = self._waiting, []
            with ExitStack() as calls:  # all of them, also behind one that raises
                for number in reversed(waiting):
                    calls.callback(self._handlers[number], number, sys._getframe())

    def _came(self, number: int, frame: FrameType | None) -> None:
        goes_through = self._is_over  # and a failure has left this handler behind
        if self._interrupts(number) and not _is_whole(frame):
            goes_through |= self._interruptible or number in self._waiting
        if not goes_through:
            self._waiting.append(number)
            return
        self.check()
        self._handlers[number](number, frame)

    def _interrupts(self, number: int) -> bool:
        """Whether the handler is Python's own, maybe behind that of another of this class."""
        handler = self._handlers[number]
        if isinstance(handler, MethodType) and isinstance(handler.__self__, HeldSignals):
            return handler.__self__._interrupts(number)
        return handler is signal.default_int_handler


class RestoredWhole(Generic[R]):
    """Context managers that put back the user's state, which no interrupt cuts short.

    While they are entered, signals are held as by :class:`HeldSignals`, for what the user's
    handlers set would be put back as well; interrupts go through at once.

    Args:
        managers: entered in this order.
    """

    def __init__(self, *managers: AbstractContextManager[R]) -> None:
        self._managers = managers

    @_runs_whole
    def __enter__(self) -> list[R]:
        with ExitStack() as stack:
            signals = stack.enter_context(HeldSignals(interruptible=True))
            entered = [stack.enter_context(manager) for manager in self._managers]
            signals.check()
            self._stack = stack.pop_all()
        return entered

    @_runs_whole
    def __exit__(self, *failure: Any) -> None:
        self._stack.__exit__(*failure)
