"""Restore a thread's modes after a call that fails, wherever an interrupt arrives.

Each context manager restores what it changed, but a ``KeyboardInterrupt`` may arrive between the
change and the ``try`` that would undo it. So the outermost call saves the state before it changes
anything, and restores it if it fails. It does so twice, because one interrupt can break off one of
the two.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from .._common.threads.model_turns import how_often_entered, leave_modules
from .._common.threads.process_changes import leave_changes
from .._common.threads.thread_state import enter_modes, give_forward_lock, in_thread, leave_modes
from .._torch.graph import pop_saved_tensor_hooks, saved_tensor_hooks
from .._torch.modes import (
    dispatch_modes,
    function_modes,
    how_many_dispatch_modes,
    pop_dispatch_mode,
)
from ..devices.rng_streams import end_turn, is_own_turn
from ..stages.cursor import (
    checkpointing,
    current_cursor,
    current_microbatch,
    recomputing,
    set_cursor,
    set_microbatch,
)

P = ParamSpec("P")
R = TypeVar("R")


class _Before:
    """The state of a thread, which the end of a block restores if the block fails."""

    def __init__(self) -> None:
        self._cursor = current_cursor()
        self._microbatch, self._recomputing = current_microbatch(), recomputing.get()
        self._checkpointing = checkpointing.get()
        self._mode, self._modes, self._forward_lock = (
            in_thread.mode,
            in_thread.modes,
            in_thread.forward_lock,
        )
        self._function_modes = function_modes()
        self._dispatch_modes = how_many_dispatch_modes()
        self._hooks = saved_tensor_hooks()
        self._grad = torch.is_grad_enabled()
        self._has_turn = is_own_turn()
        self._alone, self._shared = how_often_entered(), len(in_thread.entered)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, *traceback: object) -> None:
        if error is None:
            return
        self._put_back()
        interrupt = _interrupt_behind(error)
        if interrupt is not None:
            raise interrupt

    def _put_back(self) -> None:
        set_cursor(self._cursor)
        set_microbatch(self._microbatch)
        recomputing.set(self._recomputing)
        checkpointing.set(self._checkpointing)
        in_thread.mode, in_thread.modes = self._mode, self._modes
        if self._forward_lock is None:
            give_forward_lock()
        if function_modes() != self._function_modes:
            leave_modes()
            enter_modes(self._function_modes)
        while how_many_dispatch_modes() > self._dispatch_modes:
            pop_dispatch_mode()
        while (now := saved_tensor_hooks()) is not None and now != self._hooks:
            pop_saved_tensor_hooks()
        torch.set_grad_enabled(self._grad)
        if not self._has_turn:
            end_turn()
        leave_changes(self._shared)
        leave_modules(self._alone)


def _interrupt_behind(error: BaseException) -> BaseException | None:
    """Return the interrupt that led to an error about a missing function mode, or ``None``."""
    if not isinstance(error, IndexError | RuntimeError):
        return None  # str() of a user's own class may raise
    if "pop from empty mode stack" not in str(error):
        return None
    behind = error.__context__
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__context__
    return behind


def leaves_intact(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs forwards and backwards in the caller's thread."""

    @functools.wraps(call)
    def outermost(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _Before()
        with before, before:
            return call(*args, **kwargs)

    return outermost


def modes_around() -> Iterator[Any]:
    """Yield the user's modes in this thread, and the attributes of torch's own such as
    ``FlopCounterMode``: they see a recording too, because they may change what a forward does, and
    what they have counted is put back."""
    for mode in _modes():
        if _is_in(mode, "torch.utils."):
            yield vars(mode)  # torch's own objects are not walked through
            yield from (vars(one) for one in vars(mode).values() if _is_in(one, "torch.utils."))
    yield from users_modes()


def users_modes() -> list[Any]:
    """Return the user's modes in this thread, which are objects of classes of the user's."""
    return [mode for mode in _modes() if not _is_in(mode, "torch.", "blockpipe.")]


def _modes() -> list[Any]:
    return [*in_thread.modes, *function_modes(), *dispatch_modes()]


def _is_in(value: Any, *packages: str) -> bool:
    return f"{type(value).__module__}.".startswith(packages) and hasattr(value, "__dict__")
