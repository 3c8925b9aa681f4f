"""Keep what the import of a module sets, where a recorded forward is the first to import it.

The module stays in ``sys.modules``, so that no later import runs its code again: what it has set,
in itself and elsewhere, such as an entry in a registry, must stay as well. The code of a module is
no part of the forward. It runs without the recording's modes, which would make fake tensors of its
tables, and nobody watches it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from typing import Any

from .._common.threads.thread_state import ours
from .._torch.modes import without_dispatch_modes, without_torch_functions
from .holders import Holder
from .model_state import ModelState

_NAME = "exec_module"


@contextmanager
def kept_imports(states: Sequence[ModelState]) -> Iterator[None]:
    """While entered, have what this thread's imports set stay when some states are restored.

    Args:
        states: what a recording puts back.
    """
    thread, execute, depth = threading.get_ident(), SourceFileLoader.exec_module, [0]

    def exec_module(loader: SourceFileLoader, module: types.ModuleType) -> None:
        if threading.get_ident() != thread or depth[0]:
            execute(loader, module)
            return
        depth[0] += 1
        tracer, holders = sys.gettrace(), [h for state in states for h in state.holders]
        before = [dict(holder.now()) for holder in holders]
        sys.settrace(None)
        try:
            with ours(), without_torch_functions(), without_dispatch_modes():
                execute(loader, module)
        finally:
            for holder, then in zip(holders, before, strict=True):
                _keep(holder, then)
            depth[0] -= 1
            sys.settrace(tracer)

    with without_dispatch_modes():
        pass  # torch imports what it needs for that: not first while it imports that itself
    setattr(SourceFileLoader, _NAME, exec_module)
    try:
        yield
    finally:
        if vars(SourceFileLoader).get(_NAME) is exec_module:
            delattr(SourceFileLoader, _NAME)


def _keep(holder: Holder, then: dict[Any, Any]) -> None:
    """Have a holder restore the members that have changed since as they are now."""
    now = dict(holder.now())
    if _are_same(now.items(), then.items()):
        return
    kept = dict(holder.before)
    for key in then.keys() - now.keys():
        kept.pop(key, None)
    for key, value in now.items():
        if key not in then or then[key] is not value:
            kept[key] = value
    holder.before = [*kept.items()]


def _are_same(now: Iterable[tuple[Any, Any]], then: Iterable[tuple[Any, Any]]) -> bool:
    pairs = [*now], [*then]
    return len(pairs[0]) == len(pairs[1]) and all(
        one[0] is other[0] and one[1] is other[1] for one, other in zip(*pairs, strict=True)
    )
