"""A model's modules, closed to the user's other threads while the model is recorded.

A recording puts fake tensors in the place of parameters, and restores what the forward changes. A
call of another thread would compute with the ones, and lose what it sets to the other. So it waits
until the recording is over, and the recording begins when no other thread is in a call.

The stand-ins for the forwards were no place for this: they are put on after the fake parameters,
a module's hooks run before them, and the state that a recording restores is taken without them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ..._common.nested import tensors
from ..._common.threads.model_turns import alone_recording, alone_with, is_recorded_elsewhere
from ..._torch.modules import CALL, CALLS, COMPILED_CALL
from ..._torch.tensors import FakeTensor
from ...crossing.tags import TAG
from ...crossing.torch_patches import Replacement
from .calls import RecordedTag

# All three are guesses.
_PAUSE = 0.001  # seconds between two looks at the other threads
_STILL = 5.0  # seconds for which a call may stay at one place, as where it waits for this thread
_LONGEST = 60.0  # seconds after which the recording begins in any case


@contextmanager
def closed_to_others(model: nn.Module) -> Iterator[None]:
    """Be the only thread that records, and the only one that is in a call of the modules.

    A call of another thread that stays in a module without going on is not waited for. Nor is there
    a gate at attributes: ``net.weight`` is fake for other threads meanwhile.

    Args:
        model: the model with these modules.
    """
    with alone_recording(model), contextlib.ExitStack() as gates:
        for gate in (_GatedCalls, _GatedSave, _GatedLoad, _GatedParameters, _GatedBuffers):
            gates.enter_context(gate())
        gates.enter_context(_gated_compiled_calls(model))
        _wait_for_calls(model)
        yield


class _GatedCalls(Replacement):
    """A replacement by which a call of a module waits while another thread records the module.

    To replace ``Module.__call__`` takes milliseconds where a library has thousands of subclasses,
    for Python sets that one in each.
    """

    owner, name = nn.Module, CALL

    def replacement(self) -> Any:
        original = self._original

        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return _in_turn(module, functools.partial(original, module), args, kwargs)

        return call


class _GatedRead(Replacement):
    """A replacement by which a method that reads all parameters or buffers of a module, or sets
    them, waits while another thread records the module: they are fake."""

    owner = nn.Module

    def replacement(self) -> Any:
        original = self._original

        @functools.wraps(original)
        def read(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not is_recorded_elsewhere(module):
                return original(module, *args, **kwargs)
            with alone_with(module):
                found = original(module, *args, **kwargs)
                return iter([*found]) if isinstance(found, Iterator) else found

        return read


class _GatedSave(_GatedRead):
    name = "state_dict"


class _GatedLoad(_GatedRead):
    name = "load_state_dict"


class _GatedParameters(_GatedRead):
    name = "named_parameters"


class _GatedBuffers(_GatedRead):
    name = "named_buffers"


@contextmanager
def _gated_compiled_calls(model: nn.Module) -> Iterator[None]:
    """Let calls of modules that were compiled in place wait too: these run something else."""
    compiled = {m: call for m in model.modules() if (call := vars(m).get(COMPILED_CALL))}
    try:
        for module, call in compiled.items():
            vars(module)[COMPILED_CALL] = functools.partial(_compiled_in_turn, module, call)
        yield
    finally:
        for module, call in compiled.items():
            vars(module)[COMPILED_CALL] = call


def _compiled_in_turn(
    module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return _in_turn(module, call, args, kwargs)


def _in_turn(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # In another thread, the compiler may trace this.
    if torch.compiler.is_compiling() or not is_recorded_elsewhere(module):
        return call(*args, **kwargs)
    if any(map(_is_of_recording, tensors((args, kwargs)))):
        return call(*args, **kwargs)  # a thread of the recorded forward
    with alone_with(module):
        return nn.Module.__call__(module, *args, **kwargs)  # what it runs is as before now


def _is_of_recording(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or isinstance(getattr(tensor, TAG, None), RecordedTag)


def _wait_for_calls(model: nn.Module) -> None:
    """Wait until no other thread is in a call of one of a model's modules."""
    if threading.active_count() == 1:
        return
    modules = {id(module) for module in model.modules()}
    began = time.monotonic()
    places: dict[int, tuple[object, float]] = {}  # by thread: where it was first seen, and when
    while (now := time.monotonic()) < began + _LONGEST:
        under_way = _places_of_calls(modules)
        places = {
            thread: places[thread] if places.get(thread, (None,))[0] == place else (place, now)
            for thread, place in under_way.items()
        }
        if all(now - since > _STILL for _, since in places.values()):
            return
        time.sleep(_PAUSE)


def _places_of_calls(modules: set[int]) -> dict[int, object]:
    """Return the other threads that are in a call of these modules, and do not wait for their turn,
    with the place at which each is."""
    frames, found = sys._current_frames(), dict[int, object]()
    del frames[threading.get_ident()]  # it would hold itself, and all that called it
    for thread, innermost in frames.items():
        if _is_in_call(innermost, modules):
            found[thread] = id(innermost), innermost.f_lasti
    return found


def _is_in_call(frame: FrameType | None, modules: set[int]) -> bool:
    while frame is not None:
        if frame.f_code is _WAITING:
            return False
        is_call = frame.f_code.co_name == "forward" or frame.f_code in CALLS
        if is_call and id(frame.f_locals.get("self")) in modules:
            return True
        frame = frame.f_back
    return False


_WAITING: CodeType = alone_with._wait.__code__
