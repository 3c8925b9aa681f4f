"""Intercept a forward for the recorder: operations by a function mode, modules by stand-ins."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..._common.callsite import users_line
from ..._common.libraries import is_users
from ..._common.modules import MISSING, StandIn, forward_of
from ..._common.nested import tensors
from ..._common.threads.model_turns import alone_with
from ..._torch.graph import CheckpointHook, push_saved_tensor_hooks
from ..._torch.modes import function_mode_at, how_many_function_modes, pop_function_mode
from ..._torch.modules import SWAPS, is_moving
from ..._torch.patched_functions import torchs_own
from ..._torch.tensors import HigherOrderOperator
from ...crossing.interception import (
    CrossingMode,
    active_mode,
    is_question,
    looks_at_graph,
    uses_gradient,
)
from ...crossing.microbatch_run import Reader
from ...crossing.torch_patches import Replacement, original_set
from ...errors import RecordingError
from ..plain_values.questions.sizes_by_data import note_size
from ..plan_resolution import planned_stage
from .backward_code import seeing_context
from .recorder import SCRIPTED, Recorder

_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

# By these other libraries read a tensor's memory.
_SHOW_MEMORY = frozenset([Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])


_GIVES_VALUES = frozenset(
    [
        *(Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__array__, Tensor.__bool__),
        *(Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__),
        *(Tensor.__format__, Tensor.__repr__),
    ]
)


def _shows_memory(func: Callable[..., Any], caller: types.FrameType) -> bool:
    """Return whether a function gives the address of a tensor's memory. While fake tensors are made
    nothing is there, also of a real one, and to read it may end the process. torch itself only
    compares addresses."""
    is_asked = func is Tensor.data_ptr and is_users(caller.f_globals.get("__name__"))
    return func in _SHOW_MEMORY or is_asked


class RecordingMode(CrossingMode):
    """A mode that intercepts every operation of the recorded forward, in modules too.

    Args:
        recorder: the listener that is told of them.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.run)
        self.recorder = recorder
        self._local = recorder.read

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        left = list(iter(self._left_on, None))
        super().__exit__(kind, error, trace)
        if left and error is None:
            raise RecordingError(
                f"the forward enters {type(left[-1]).__name__}, a mode of torch, and does not "
                "leave it, so that it would be on for other stages and micro-batches, in whatever "
                f"order they come ({users_line()}); enter it by 'with' in the forward, or around "
                "the step"
            )

    def _left_on(self) -> TorchFunctionMode | None:
        """Take off a mode that the forward has left on."""
        innermost = function_mode_at(how_many_function_modes() - 1)
        return None if innermost is self else pop_function_mode()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        modes: Sequence[TorchFunctionMode] = (),
    ) -> Any:
        if how_many_function_modes():
            return self.apart(func, types, args, kwargs)
        func = func if modes else torchs_own(func)
        recorder = self.recorder
        recorder.check_interrupts()
        recorder.late.operated()
        recorder.costs.function = func.__name__
        if not is_question(func):
            recorder.operation()
            recorder.changes.at_operation(recorder.hop)
            recorder.look_outside()
        elif looks_at_graph(func):
            recorder.looked_at_graph(args[0], args[1] if len(args) > 1 else None)
        recorder.changes.at_function(func, args)
        if recorder.result.fake and _shows_memory(func, sys._getframe(1)):
            error = TypeError(f"expected a tensor with memory for {func.__name__}, got a fake one")
            recorder.failed.append(error)
            raise error
        if isinstance(func, HigherOrderOperator):
            recorder.custom.calls_functions(func.name())
        try:
            result = super().__torch_function__(func, types, args, kwargs, modes)
        except (RuntimeError, TypeError) as error:
            recorder.failed += [error] if recorder.result.fake and func in _GIVES_VALUES else []
            raise
        if not recorder.result.fake:
            note_size(func, args, kwargs or {}, result)
            self._hands_out(func, args, sys._getframe(1))
        recorder.check_outsiders(func, args[0] if args else None)
        recorder.late.operated((args, kwargs))
        if func is torch.autograd.grad:
            recorder.backward_code.ran_backward(tensors((args, kwargs)), tensors(result))
        if func is original_set:
            recorder.wrote(recorder.stand_in(args[0]))
        if func == _SETS_DATA:  # each look at it makes another object
            recorder.late.assigned(recorder.stand_in(args[0]), args[1])
        elif uses_gradient(func) and not is_moving(sys._getframe(1)):
            self._opens_calls(args[0])
            how = "reads" if func.__name__ == "__get__" else "sets"
            recorder.late.uses_gradient(recorder.stand_in(args[0]), how)
        return result

    def _hands_out(
        self, func: Callable[..., Any], args: tuple[Any, ...], caller: types.FrameType
    ) -> None:
        """Note that a library which the user's code calls may write to a tensor's memory."""
        if func in _SHOW_MEMORY and is_users(caller.f_globals.get("__name__")):
            self.recorder.late.may_write(args[0], self.recorder.hop, users_line())

    def _opens_calls(self, tensor: Tensor) -> None:
        """Open the calls that ask for the ``.grad`` of a tensor of another stage: as an argument of
        a sealed one it would be a copy, which has none."""
        recorder = self.recorder
        if recorder.run.is_foreign(recorder.stand_in(tensor)):
            for call in recorder.calls:
                call.open(f"it reads the .grad of a tensor of another stage ({users_line()})")

    def _handed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reader:
        given = self.recorder.calls.given_inside()
        return self.run.handed(func, args, kwargs, self._local, given)

    def call_inner(
        self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with seeing_context() as contexts:
            result = apply(*args, **kwargs)
        for context in contexts:
            self.recorder.backward_code.applies(context, max(self.recorder.hop, 0))
        return result

    def saw_node_hook(self, hook: Callable[..., Any]) -> None:
        self.recorder.backward_code.hooks_node(hook)

    def saw_module_hooks(self, module: nn.Module, hooks: Iterable[Callable[..., Any]]) -> None:
        self.recorder.run.arrive()
        for hook in hooks:
            self.recorder.backward_code.calls(hook, module, self.recorder.hop_here())

    def saw_checkpoint(self, recompute: Callable[..., Any]) -> None:
        self.recorder.note_checkpoint(recompute)

    def saw_setting(self) -> None:
        self.recorder.changes.at_operation(self.recorder.hop_here())

    def saw_generator_set(self, kind: str) -> None:
        draws = self.recorder.draws
        draws.drew(None) if kind == "torch" else draws.sets_state(kind)

    def saw_custom_function(self, name: str, *, is_scripted: bool = False) -> None:
        self.recorder.operation()
        self.recorder.custom_function(name)
        if is_scripted:
            self.recorder.calls.refuse(SCRIPTED)

    def call_function(
        self, key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.recorder.watched(key, "function", function, function, args, kwargs)


class PackingSeen(Replacement):
    """A replacement by which a recording sees what hooks keep of the tensors that autograd saves.
    The hooks that are on last hide those before, and so the recording's own."""

    owner, name = saved_tensors_hooks, "__enter__"

    def replacement(self) -> Any:
        enter = self._original

        def entered(hooks: Any) -> None:
            mode = active_mode()
            if not isinstance(mode, RecordingMode):
                enter(hooks)
                return
            reads = mode.recorder.late.reads
            if isinstance(hooks, CheckpointHook):
                hooks.pack_hook = reads.rerun(hooks.pack_hook)
                enter(hooks)
            else:  # they may be entered again, in a step
                push_saved_tensor_hooks(*reads.watched(hooks.pack_hook, hooks.unpack_hook))

        return entered


class SwapsSeen(Replacement):
    """A replacement by which a recording sees which modules ``torch.func.functional_call`` gives
    other tensors for a while: those tensors may be read without a call, and nobody need have
    registered the module."""

    owner, name = SWAPS

    def replacement(self) -> Any:
        swap = self._original

        def swapped(accessor: Any, given: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            result = swap(accessor, given, *args, **kwargs)
            mode = active_mode()
            if isinstance(mode, RecordingMode):
                changes, hop = mode.recorder.changes, mode.recorder.hop_here()
                changes.swaps(accessor.module, result[0], given, hop)
            return result

        return swapped


class RecordedForward(StandIn):
    """A stand-in for a module's forward, which reports the call to the recorder.

    A call in another thread is not a part of the recording. It waits until the recording is over,
    because the parameters are fake until then.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        path: str,
        module: nn.Module,
        recorder: Recorder,
        stages: Mapping[int | None, int] | None,
    ) -> None:
        self.forward = forward
        self.path = path
        self.module = module
        self.recorder = recorder
        self.stages = stages
        self._thread = threading.get_ident()
        self._of_class = _calls_of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if threading.get_ident() != self._thread and not recorder.gave((args, kwargs)):
            with alone_with(self.module):
                return self.forward(*args, **kwargs)
        if self.stages is not None:
            call_number = recorder.run.cursor.count_call(self)
            now = recorder.cursor.stage
            stage = planned_stage(self.stages, call_number, now)
            if stage != now:
                recorder.begun_by = f"{self.path!r} call {call_number}"
            recorder.cursor.move(stage, None)
        recorder.check_interrupts()
        if self.own is MISSING and _calls_of(self.module) != self._of_class:
            self._refuse()
        recorder.changes.at_call(self.path, self.module)
        recorder.look_outside()
        kind = type(self.module).__name__
        return recorder.watched(self.path, kind, self.module, self.forward, args, kwargs)

    def _refuse(self) -> None:
        raise RecordingError(
            f"expected modules whose classes keep their forwards, got {self.path!r}, of whose "
            f"class {type(self.module).__qualname__} the forward, or __call__, is another one for "
            f"a while ({users_line()}): a step calls the one of before, and other stages would "
            "call this one; call a function of your own, or replace it around the whole step"
        )


def _calls_of(module: nn.Module) -> tuple[int, int]:
    """Return which forward a module's class has, and which way to call it."""
    kind: Any = type(module)
    return id(forward_of(kind)), id(kind.__call__)
