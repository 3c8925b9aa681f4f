"""What is around the code that runs in a thread: modes, transforms, and what autograd's threads
inherit.

Most names are torch's own functions under a public name, and no wrappers: an operation may come
through several of them.
"""

import atexit
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch

P = ParamSpec("P")
T = TypeVar("T")

# --- function modes, which see the functions that Python code calls

function_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
"""The function modes of this thread, the outermost first. A mode can be entered and left in public,
but who looks which ones are there has to ask torch's stack."""

how_many_function_modes = torch._C._len_torch_function_stack
"""The length of :data:`function_modes`, without making a list: asked for each operation."""

function_mode_at = torch._C._get_function_stack_at
"""One of :data:`function_modes`, without making a list."""

push_function_mode = torch._C._push_on_torch_function_stack
"""Put a function mode on that somebody has entered elsewhere. ``with mode:`` would enter it twice,
and modes with a state of their own are reset by that."""

pop_function_mode = torch._C._pop_torch_function_stack
"""Take the innermost function mode off, and return it. Only who entered a mode can leave it in
public, and that is the user."""

without_torch_functions = torch._C.DisableTorchFunction
"""A context manager: neither modes nor tensors of other classes see what is called. torch's pages
on extending it name this way and no other."""

as_plain_tensor = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class of tensors whose results are plain tensors, as torch's
pages on extending it have it."""

# --- dispatch modes, which see the operations below autograd

DispatchMode = _python_dispatch.TorchDispatchMode
"""The base of modes that see every operation; torch documents it, but has no public module for
it."""

dispatch_modes: Callable[[], list[DispatchMode]] = _python_dispatch._get_current_dispatch_mode_stack
"""The dispatch modes of this thread, the outermost first; as :data:`function_modes`."""

how_many_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The length of :data:`dispatch_modes`."""

push_dispatch_mode = _python_dispatch._push_mode
"""Put a dispatch mode on that somebody has entered elsewhere; as :data:`push_function_mode`."""

pop_dispatch_mode: Callable[[], DispatchMode] = _python_dispatch._pop_mode
"""Take the innermost dispatch mode off; as :data:`pop_function_mode`."""

without_dispatch_modes = _python_dispatch._disable_current_modes
"""A context manager: no dispatch mode of this thread's sees what is called. Modes can be left in
public by who has entered them."""

# --- context managers

KEPT_BY_CONTEXTS: dict[type, tuple[str, ...]] = {
    torch.autocast: ("prev", "prev_cache_enabled", "prev_fastdtype"),
    torch.no_grad: ("prev",),
    torch.enable_grad: ("prev",),
    torch.inference_mode: ("_inference_mode_context",),
    torch.autograd.profiler.record_function: ("record",),
    torch.accelerator.device_index: ("prev_idx",),
    **{backend.device: ("prev_idx",) for backend in (torch.cuda, torch.xpu, torch.mtia)},
    **{
        backend.StreamContext: ("src_prev_stream", "dst_prev_stream")
        for backend in (torch.cuda, torch.xpu, torch.mtia)
    },
}
"""The attributes in which torch's context managers keep what they found in a thread when they are
entered; no other way leads there. Others keep nothing (``saved_tensors_hooks``, function modes),
keep it when they are made (``set_grad_enabled``), make another object each time
(``torch.device``, ``torch.cuda.stream``), or are about state of the process (``sdpa_kernel``)."""

# --- transforms

is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is that of a torch.func transform, which must not meet a copy of ours. The class
of these tensors is ``Tensor``: there is nothing else to tell them by."""


def inside_of_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that the transforms of torch.func have wrapped."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_in_transform() -> bool:
    """Whether this thread is inside of a torch.func transform, which cannot be asked in public."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function for which no torch.func transform of this thread's is entered: an operation
    of ours on a tensor that a transform only closes over is no part of it."""
    if not is_in_transform():
        return function(*args, **kwargs)
    with pyfunctorch.temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)


def is_in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is entered. The public module can enter one, and not
    say."""
    return bool(forward_ad._current_level >= 0)


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a tangent of forward-mode AD."""
    return is_in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


# --- what autograd's device threads inherit


_PATIENCE = 1.0  # seconds; a thread's end takes milliseconds


def stash(key: str, value: object) -> None:
    """Keep something where autograd's device threads find what their caller had (:func:`stashed`).

    They take over the caller's thread-local state of torch, and context variables are none of it.
    torch up to 2.11 takes over the caller's reference instead of one of its own.

    Nothing takes it out again. A thread gives it back when it ends, and the process aborts if the
    interpreter ends meanwhile, which waits for the Python part of a thread alone.
    """
    _stashers.add(threading.current_thread().native_id)  # autograd's own are known from here on
    if _takes_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def stashed(key: str) -> Any:
    """What this thread, or the one that it works for, has kept; ``None``: nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


_stashers = set[int | None]()  # the threads that keep something


@atexit.register
def let_threads_end() -> None:
    """Wait for the threads that keep something and are ending."""
    running = {thread.native_id for thread in threading.enumerate()}
    ending, until = _stashers - running, time.monotonic() + _PATIENCE
    while any(map(_is_there, ending)) and time.monotonic() < until:
        time.sleep(0.001)  # one of them may need the interpreter


def _is_there(thread: int | None) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")


@functools.cache
def _takes_reference() -> bool:
    probe = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("blockpipe_probe", probe)
    return sys.getrefcount(probe) == before


# --- torch.compile


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that ``torch.compile`` calls as it is, where it compiles a caller of it.

    ``torch.compiler.disable`` was no alternative: it imports the compiler, which takes seconds, as
    soon as a function is decorated. Here this is done when a compiler comes by.
    """
    disabled: Callable[P, T] = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        run = disabled if torch.compiler.is_dynamo_compiling() else function
        return run(*args, **kwargs)

    return call
