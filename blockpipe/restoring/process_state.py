"""Save and restore what a process has once and every object sees: output streams, warning filters,
environment variables, the limit of recursion, and the precision of decimal numbers.

A forward may change streams and filters for a while with ``redirect_stdout`` and
``catch_warnings``, which restore what they found. If several threads are in them at once, the last
one to leave restores another thread's setting, and all that the program prints later is lost.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

_TORCHS = ("TORCH", "PYTORCH")  # torch sets some itself when a part of it is first used


def process_state() -> tuple[Any, ...]:
    """Return the process's output streams, warning filters, and what shows warnings."""
    shows = warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)
    return sys.stdout, sys.stderr, tuple(warnings.filters), shows


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
        sys.stdout, sys.stderr, filters, (shows, receives) = self._before
        warnings.filters[:] = filters  # type: ignore[index]
        warnings.showwarning = shows
        if receives is not None:
            setattr(warnings, "_showwarnmsg_impl", receives)  # noqa: B010 - it is Python's own
        with warnings.catch_warnings():
            pass  # it invalidates caches of the filters


def kept_interpreter() -> Callable[[], None]:
    """Save it, and return a function that restores it."""
    environment = _kept_environment()
    limit, context = sys.getrecursionlimit(), _kept_context()

    def restore() -> None:
        environment()
        if sys.getrecursionlimit() != limit:
            sys.setrecursionlimit(limit)
        context()

    return restore


def _kept_environment() -> Callable[[], None]:
    before, modules = dict(os.environ), len(sys.modules)

    def restore() -> None:
        # A module that was imported meanwhile stays, and what it has set with it.
        for name in os.environ.keys() - before.keys() if len(sys.modules) == modules else ():
            if not name.startswith(_TORCHS):
                del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _kept_context() -> Callable[[], None]:
    """Keep the settings of decimal numbers, if anybody uses such numbers by now."""
    decimal = sys.modules.get("decimal")
    if decimal is None:
        return lambda: None
    context = decimal.getcontext()
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    before = [getattr(context, name) for name in names]
    flags, traps = context.flags.copy(), context.traps.copy()

    def restore() -> None:
        if decimal.getcontext() is not context:
            decimal.setcontext(context)
        for name, value in zip(names, before, strict=True):
            if getattr(context, name) != value:
                setattr(context, name, value)
        context.flags.update(flags)
        context.traps.update(traps)

    return restore
