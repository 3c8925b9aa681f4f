"""Save and restore what a process has once and every object sees: environment variables, the limit
of recursion, and the precision of decimal numbers.
"""

import os
import sys
from collections.abc import Callable

_TORCHS = ("TORCH", "PYTORCH")  # torch sets some itself when a part of it is first used


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
