"""The caller's thread state, for the threads that work for it.

New threads start with torch's defaults: a pipeline whose stages forget autocast or ``no_grad``
trains something else (torchgpipe hands on grad mode alone, and its workers ignore autocast).
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..._torch.graph import pop_saved_tensor_hooks, saved_tensor_hooks
from ..._torch.modes import (
    dispatch_modes,
    function_modes,
    how_many_dispatch_modes,
    how_many_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

P = ParamSpec("P")
R = TypeVar("R")
_UNSET = object()


class ThreadState(threading.local):
    """What a thread of ours is doing: the glue of the run that runs in it, the forward lock, if it
    holds that (at most one thread runs forward code for accelerators at a time), the function
    modes that are off meanwhile, what it has entered that all threads see, and whether it is one
    that only works for callers."""

    def __init__(self) -> None:
        self.entered: list[Any] = []

    mode: Any = None
    forward_lock: "threading.Lock | None" = None
    modes: "Sequence[TorchFunctionMode]" = ()  # the user's, while what runs is ours
    is_ours: bool = False


in_thread = ThreadState()


def leave_modes() -> list[TorchFunctionMode]:
    """Take every function mode off this thread; returns them for :func:`enter_modes`."""
    if how_many_function_modes() == 1:  # the common case
        return [pop_function_mode()]
    return [pop_function_mode() for _ in range(how_many_function_modes())][::-1]


def enter_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Put function modes back that :func:`leave_modes` took off.

    They are pushed, not entered: whoever entered them has done that, and twice may reset them.
    """
    for mode in modes:
        push_function_mode(mode)


def call_under(
    modes: Sequence[TorchFunctionMode],
    function: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> R:
    """Call a function of the user's, or of torch's, under these function modes."""
    enter_modes(modes)
    try:
        return function(*args, **kwargs)
    finally:
        for _ in modes:
            pop_function_mode()


class ours:  # noqa: N801 - a context manager that reads as a word
    """While entered, no function mode is on in this thread, for what runs is Blockpipe's own.

    The glue would take our operations for the forward's, and the user's modes would see them, and
    change them: under ``with torch.device("cuda:1")`` a tensor of ours would be made there.
    Disabling torch functions was no alternative: it would take tensors of the user's own classes
    for plain ones.
    """

    def __enter__(self) -> None:
        self._outer = in_thread.modes
        self._modes = leave_modes()
        if self._modes:
            in_thread.modes = self._modes

    def __exit__(self, *_: object) -> None:
        enter_modes(self._modes)
        in_thread.modes = self._outer


def as_ours(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates what users call, and what calls them in :class:`theirs`."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ours():
            return method(*args, **kwargs)

    return call


class theirs:  # noqa: N801
    """While entered, the function modes that :class:`ours` took off are on: the user's code runs.

    Without :class:`ours` around it they are on anyway, and this does nothing.
    """

    def __enter__(self) -> None:
        self._modes = in_thread.modes
        if self._modes:  # seldom, and each micro-batch comes by here
            in_thread.modes = ()
            enter_modes(self._modes)

    def __exit__(self, *_: object) -> None:
        if self._modes:
            for _mode in self._modes:
                pop_function_mode()
            in_thread.modes = self._modes


def take_forward_lock(forward_lock: "threading.Lock") -> None:
    """Wait for the forward lock; then this thread holds it."""
    forward_lock.acquire()
    in_thread.forward_lock = forward_lock


def give_forward_lock() -> None:
    """Let another thread have the forward lock, if this one holds it."""
    held, in_thread.forward_lock = in_thread.forward_lock, None
    if held is not None:
        held.release()


@contextmanager
def waiting_for_device() -> Iterator[None]:
    """Release the forward lock while this thread waits for a device or another thread.

    A thread that waits with the lock held keeps every other device from being given work.
    """
    forward_lock = in_thread.forward_lock
    give_forward_lock()
    try:
        yield
    finally:
        if forward_lock is not None:
            take_forward_lock(forward_lock)


class CallContext:
    """What is around one call in a forward, so that it can be run again as it ran: autocast,
    context variables, function modes.

    Args:
        modes: those that the user's code has entered.
    """

    def __init__(self, modes: Sequence[TorchFunctionMode]) -> None:
        self._context = contextvars.copy_context()
        self._autocast = autocast_states()
        self._modes = modes

    def run(self, function: Callable[[], R]) -> R:
        """Call a function of ours in them; the function modes are on in :class:`theirs`."""
        return self._context.copy().run(self._run, function)

    def _run(self, function: Callable[[], R]) -> R:
        mode, in_thread.mode = in_thread.mode, None
        try:
            with ours(), ExitStack() as stack:
                in_thread.modes = self._modes
                for now, then in zip(autocast_states(), self._autocast, strict=True):
                    if now != then:
                        kind, is_on, dtype = then
                        stack.enter_context(
                            torch.autocast(kind, dtype, enabled=is_on, cache_enabled=False)
                        )
                return function()
        finally:
            in_thread.mode = mode


def autocast_states() -> list[tuple[str, bool, torch.dtype]]:
    """Return for each kind of device its name, whether autocast is on there, and its dtype."""
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _device_kinds()
    ]


class CallerState:
    """What the caller's thread had when it called: grad and inference mode, autocast, modes,
    saved-tensor hooks, context variables, current streams."""

    def __init__(self) -> None:
        states = autocast_states()
        self._autocast = [(kind, dtype) for kind, is_on, dtype in states if is_on]
        self._autocast_off = [(kind, False, dtype) for kind, _, dtype in states]
        self._caches_casts = torch.is_autocast_cache_enabled()

    def for_threads(self) -> Self:
        """Keep what other threads need as well; in the caller's own there is no need to."""
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._function_modes = [*in_thread.modes, *function_modes()]
        self._dispatch_modes = dispatch_modes()
        self._hooks = saved_tensor_hooks()
        self._streams = _current_streams()
        modes = self._function_modes, self._dispatch_modes
        entered = self._autocast, self._inference, *modes, self._hooks, self._streams
        self._has_grad_mode_alone = not any(entered)
        return self

    @property
    def autocasts(self) -> bool:
        """Whether the caller has autocast on."""
        return bool(self._autocast)

    def run(self, function: Callable[[], R], *, backward: bool = False) -> R:
        """Call a function in this thread, which is ours, as if in the caller's; after
        :meth:`for_threads`.

        Args:
            function: what to call.
            backward: grad mode on and autocast off, as ``loss.backward()`` has them.
        """
        return self._context.copy().run(self._run, function, backward)

    def variables_set(self) -> dict[contextvars.ContextVar[Any], Any]:
        """The context variables that code in :meth:`run` has set so far, with their values."""
        now, before = contextvars.copy_context(), self._context
        return {one: now[one] for one in now if before.get(one, _UNSET) is not now[one]}

    def _run(self, function: Callable[[], R], backward: bool) -> R:
        in_thread.is_ours = True
        self._take_off_leftovers()
        if torch.is_inference_mode_enabled():  # left by a guard that is still there
            with torch.inference_mode(False):
                return self._run_in_clean(function, backward)
        return self._run_in_clean(function, backward)

    def _take_off_leftovers(self) -> None:
        """Take off what the user's code has left on in this thread, whatever it worked for then: a
        mode that was entered in a stage, or in a hook, and not left."""
        if autocast_states() != self._autocast_off:
            for kind, is_on, dtype in self._autocast_off:
                torch.set_autocast_enabled(kind, is_on)
                torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches_casts)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting():
            torch.clear_autocast_cache()
        if how_many_function_modes():
            with suppress(AssertionError):  # its mode is not where torch looks for it
                torch.set_default_device(None)
            leave_modes()
        while how_many_dispatch_modes():
            pop_dispatch_mode()
        while saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()

    def _run_in_clean(self, function: Callable[[], R], backward: bool) -> R:
        if self._has_grad_mode_alone:  # to enter nothing, one by one, takes as long as an action
            with torch.set_grad_enabled(self._grad or backward):
                return function()
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(stream)
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad or backward))
            if not backward:
                stack.enter_context(self.uncached_autocast())
            stack.enter_context(self._modes())
            return function()

    @contextmanager
    def uncached_autocast(self) -> Iterator[None]:
        """The caller's autocast without its cache of cast weights.

        The cache is the process's: it would tie the graphs of two micro-batches together.
        """
        with ExitStack() as stack:
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextmanager
    def no_autocast(self) -> Iterator[None]:
        """Autocast off, for a backward in the caller's own thread."""
        with ExitStack() as stack:
            for kind, _ in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # Pushed, not entered: the caller has entered them, and entering twice may reset them.
        # The function modes wait until the user's code runs.
        before, in_thread.modes = in_thread.modes, self._function_modes
        hooks = saved_tensors_hooks(*self._hooks) if self._hooks is not None else nullcontext()
        for dispatched in self._dispatch_modes:
            push_dispatch_mode(dispatched)
        try:
            with hooks:
                yield
        finally:
            for _ in self._dispatch_modes:
                pop_dispatch_mode()
            in_thread.modes = before


@functools.cache
def _accelerator() -> torch.device | None:
    """The machine's kind of accelerator, if there is one to use: asked once, for it takes time."""
    return torch.accelerator.current_accelerator(check_available=True)


def _device_kinds() -> list[str]:
    accelerator = _accelerator()
    return ["cpu"] + ([accelerator.type] if accelerator is not None else [])


def _current_streams() -> list[Any]:
    if _accelerator() is None:
        return []
    count = torch.accelerator.device_count()
    here = torch.accelerator.current_device_index()
    order = [*(i for i in range(count) if i != here), here]  # the last one entered is current
    return [torch.accelerator.current_stream(i) for i in order]


@contextmanager
def intra_operation_threads(count: int | None) -> Iterator[None]:
    """While entered, operations on the CPU have so many threads; ``None``: as many as they had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
