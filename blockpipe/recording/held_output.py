"""Hold back what the user's own code prints, logs and warns of while a forward is recorded.

A step says it again, so a recording that succeeds says nothing; one that fails shows it, in order.
The streams, the handlers and the warnings are the process's, so what other threads say goes where
it went. So does what a library says: it may say that only once, and the step would not repeat it.
If it says so in a function with a cache, as ``logger.warning_once`` does, the line is kept as well,
and the cache forgets that call. A handler of a class of the user's gets its records, because the
forward may read what it keeps; what it keeps is put back (:class:`UsersListeners`), and what a
filter of the user's counts.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .._common.libraries import is_users
from ..restoring.holders import CacheHolder, Holder
from ..restoring.model_state import ModelState

_OWN = f"{__name__.partition('.')[0]}."
_STREAMS = ("stdout", "stderr")
_handle = logging.Handler.handle


class HeldOutput:
    """While entered, keep what this thread's own code says; at the end, show it if that failed.

    Args:
        is_last: tells of an error whether no other run follows it, which would say it again.
    """

    def __init__(self, is_last: Callable[[BaseException], bool]) -> None:
        self._is_last = is_last
        self._said: list[Callable[[], object]] = []
        self._warned: list[tuple[str, Any]] = []
        self._caches: list[CacheHolder] = []
        self._thread = threading.get_ident()
        self._is_on = False

    def __enter__(self) -> None:
        self._is_on = True
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._held = {
            name: _HeldStream(self, stream)
            for name, stream in self._streams.items()
            if stream is not None
        }
        for name, held in self._held.items():
            setattr(sys, name, held)
        self._show_warning: Any = warnings.showwarning
        self._warn: Any = self._keep_warning  # one object, to be found again
        warnings.showwarning = self._warn

        def handle(handler: logging.Handler, record: logging.LogRecord) -> Any:
            return self._keep_record(handler, record)

        self._handles: Any = handle
        logging.Handler.handle = self._handles  # type: ignore[assignment, method-assign]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_on = False
        for name, held in self._held.items():
            if getattr(sys, name) is held:
                setattr(sys, name, self._streams[name])
        if warnings.showwarning is self._warn:
            warnings.showwarning = self._show_warning
        if logging.Handler.handle is self._handles:
            logging.Handler.handle = _handle  # type: ignore[method-assign]
        if error is not None and self._is_last(error):
            for say in self._said:
                say()
            return
        for cache in reversed(self._caches):
            cache.restore()
        if self._warned:
            self._forget_warnings()

    def keeps(self, caller: FrameType | None) -> bool:
        """Return whether what a frame says now is kept."""
        if not self._is_on or threading.get_ident() != self._thread or caller is None:
            return False
        if is_users(caller.f_globals.get("__name__")):
            return True
        cached = [*_cached_around(caller)]
        self._caches += [CacheHolder(one, restores=True) for one in cached]
        return bool(cached)

    def keep(self, say: Callable[[], object]) -> None:
        """Keep something that was said."""
        self._said.append(say)

    def _keep_record(self, handler: logging.Handler, record: logging.LogRecord) -> Any:
        caller = _caller("logging", "logging.handlers", __name__)
        is_kept = self.keeps(caller)  # notes caches, whoever the handler is
        if is_users(type(handler).__module__) or not is_kept:
            return _handle(handler, record)
        self.keep(lambda: _handle(handler, record))
        return True

    def _keep_warning(self, message: Any, category: Any, *where: Any, **more: Any) -> None:
        caller = _caller("warnings", "_py_warnings", __name__)
        # torch's C++ warns from the same frame, and only once.
        names = () if caller is None else caller.f_code.co_names
        show = functools.partial(self._show_warning, message, category, *where, **more)
        if self.keeps(caller) and ("warn" in names or "warn_explicit" in names):
            self.keep(show)
            self._warned.append((str(message), category))
        else:
            show()

    def _forget_warnings(self) -> None:
        """Let the step give the warnings again: Python notes which ones were shown."""
        once: dict[Any, Any] = warnings.onceregistry  # type: ignore[attr-defined]
        for warned in self._warned:
            once.pop(warned, None)
        with warnings.catch_warnings():
            pass  # it invalidates the other notes


class _HeldStream:
    """A stream in the place of ``sys.stdout``, which passes on what is not kept.

    Args:
        held: who keeps what is written.
        stream: the stream of before.
    """

    def __init__(self, held: HeldOutput, stream: Any) -> None:
        self._held = held
        self._stream = stream

    def write(self, text: str) -> Any:
        if not self._held.keeps(sys._getframe(1)):
            return self._stream.write(text)
        self._held.keep(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        caller = sys._getframe(1)
        for line in lines:
            if self._held.keeps(caller):
                self._held.keep(functools.partial(self._stream.write, line))
            else:
                self._stream.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _caller(*modules: str) -> FrameType | None:
    """Return the innermost frame that is of none of these modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in modules:
        frame = frame.f_back
    return frame


def _cached_around(frame: FrameType | None) -> Iterator[Any]:
    """Yield the functions with a ``functools.lru_cache`` that a frame is called by, or runs itself,
    as far as the recording."""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if module.startswith(_OWN):
            return
        kind = type(frame.f_locals.get(code.co_varnames[0])) if code.co_argcount else object
        held = (vars(base).get(code.co_name) for base in kind.__mro__)
        for found in (frame.f_globals.get(code.co_name), *held):
            is_cached = isinstance(found, functools._lru_cache_wrapper)
            wrapped = getattr(found, "__wrapped__", None) if is_cached else None
            if wrapped is not None and getattr(wrapped, "__code__", None) is code:
                yield found
        frame = frame.f_back


class UsersListeners:
    """The handlers and filters of all loggers that are the user's. The end of a block puts back
    what they keep, unless nobody but threads of before has logged: what those say is theirs."""

    def __init__(self) -> None:
        self._state = ModelState(values=False, others=_users_listeners())
        self._has_logged = False

    @property
    def holders(self) -> list[Holder]:
        """What holds the state of the objects that they reach."""
        return self._state.holders

    def __enter__(self) -> None:
        me = threading.get_ident()
        others = {thread.ident for thread in threading.enumerate()} - {me}
        self._made: Any = logging.getLogRecordFactory()

        def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
            self._has_logged |= threading.get_ident() not in others
            record: logging.LogRecord = self._made(*args, **kwargs)
            return record

        self._makes = make
        logging.setLogRecordFactory(make)
        self._state.__enter__()

    def __exit__(self, *failure: object) -> None:
        if logging.getLogRecordFactory() is self._makes:
            logging.setLogRecordFactory(self._made)
        self.restore_again()

    def restore_again(self) -> None:
        """Put it back once more, as :meth:`ModelState.restore_again` does."""
        if self._has_logged:
            self._state.restore_again()


def _users_listeners() -> Iterator[Any]:
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for told in (*getattr(logger, "handlers", ()), *getattr(logger, "filters", ())):
            if is_users(getattr(told, "__module__", logging.__name__)):
                yield told
