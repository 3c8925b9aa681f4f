"""Tape a forward in one more watched run, in which sealed modules are single calls.

It follows a recording, which says which modules are sealed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from ..._common.callsite import users_line
from ..._common.modules import OwnHook, StandIn
from ..._common.nested import map_leaves
from ..._torch.modules import forward_hooks_of, forward_pre_hooks_of
from ...crossing.interception import active_mode
from ...crossing.torch_patches import (
    Backwards,
    CustomFunctions,
    Eager,
    GeneratorStates,
    Replacement,
    ScriptFunctions,
    UnseenOperations,
)
from ...errors import RecordingError
from ...recording.plan_resolution import planned_stage
from ...recording.recording import Recording
from ...recording.sample import RecordRequest
from ...stages.cursor import Cursor, set_cursor
from ...stages.marks import mark_of
from .backward_hooks import BackwardHooksAside
from .code_seen import CodeSeen
from .hooks_of_all import HooksOfAllModules
from .left_behind import StatesBefore
from .mode import TapingMode
from .tape import REMEDY, Tape, plain_values


def taped(
    request: RecordRequest, recording: Recording, device: torch.device, *, fake: bool
) -> Tape:
    """Run a forward, and write down what its glue does.

    Args:
        request: the forward, under settings that are restored afterwards.
        recording: the recording of the same forward.
        device: the device of the model's tensors during the run.
        fake: whether the tensors are fake.

    Raises:
        RecordingError: a tape cannot hold the glue.
    """
    model = request.model
    cursor = Cursor(follow_marks=request.planned is None)
    mode = TapingMode(model, recording, cursor, device, fake=fake)
    stages = {} if request.planned is None else request.planned.stages
    before = set_cursor(cursor)
    states, seen = StatesBefore(model, recording), CodeSeen(lambda: mode.inside)
    of_all, places = HooksOfAllModules(partial(_is_single, mode)), []
    backward = BackwardHooksAside(model)
    try:
        for path, module in model.named_modules():
            given = mode, seen, (of_all, backward), stages.get(path)
            forward = _TapedForward(module.forward, path, module, *given)
            places.append((module.__dict__, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        args, kwargs = map_leaves(mode.take_input, (request.args, request.kwargs))
        mode.tape.inputs = mode.encoded((args, kwargs))
        with ExitStack() as stack:
            for watch in (Backwards(), CustomFunctions(), ScriptFunctions(), mode.watch):
                stack.enter_context(watch)
            for told in (Tracing(), Seeds(), GeneratorStates()):
                stack.enter_context(told)
            stack.enter_context(UnseenOperations())
            stack.enter_context(Eager())
            stack.enter_context(of_all)
            stack.enter_context(backward)
            stack.enter_context(mode)
            stack.enter_context(seen)
            output = model(*args, **kwargs)
        mode.check_draws()
        if mode.hop < 0:
            mode.arrive()
        mode.tape.output, mode.tape.names = mode.encoded(output), seen.names()
    finally:
        set_cursor(before)
        for names, own in places:
            names.pop("forward", None)
            if own is not None:
                names["forward"] = own
    states.settle(mode, seen)
    mode.note_metas()
    if mode.tape.route != recording.route:
        raise RecordingError(
            f"expected the recorded route {recording.route} again, got {mode.tape.route} "
            f"({users_line()}); a forward that takes another way each time has no fixed stages"
        )
    return mode.tape


class Tracing(Replacement):
    """A replacement by which ``torch.jit.is_tracing`` says in the glue that this is a trace.

    Libraries ask it before they branch on data: transformers looks whether a mask is all ones, and
    on fake tensors or in a trace it builds the mask whatever is in it.
    """

    owner, name = torch.jit, "is_tracing"

    def replacement(self) -> Any:
        return _is_tracing


_original_is_tracing: Any = vars(torch.jit)["is_tracing"]


@functools.wraps(_original_is_tracing)
def _is_tracing() -> bool:
    mode = active_mode()
    if not isinstance(mode, TapingMode) or not mode.is_on():
        return bool(_original_is_tracing())
    if sys._getframe(1).f_globals.get("__name__") == stateless.__name__:
        raise RecordingError(
            "expected modules that are called with parameters of their own, as stages call them, "
            f"got torch.func.functional_call between modules ({users_line()}); {REMEDY}"
        )
    return True


class Seeds(Replacement):
    """A replacement by which it is noticed that the glue seeds torch's generator. To the same seed,
    its state may be the same as before."""

    owner, name = torch, "manual_seed"

    def replacement(self) -> Any:
        return _manual_seed


_original_manual_seed: Any = torch.manual_seed


@functools.wraps(_original_manual_seed)
def _manual_seed(seed: int) -> torch.Generator:
    mode = active_mode()
    if isinstance(mode, TapingMode):
        mode.saw_generator_set("torch")
    made: torch.Generator = _original_manual_seed(seed)
    return made


class _TapedForward(StandIn):
    """Stands around every module's forward: a sealed one is written down as one call."""

    def __init__(
        self,
        forward: Callable[..., Any],
        path: str,
        module: nn.Module,
        mode: TapingMode,
        seen: CodeSeen,
        hooks: tuple[HooksOfAllModules, BackwardHooksAside],
        stages: Mapping[int | None, int] | None,
    ) -> None:
        self.forward = forward
        self.path = path
        self.module = module
        self.mode = mode
        self.seen = seen
        self.of_all, self.backward_hooks = hooks
        self.stages = stages
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode, call = self.mode, self._calls
        self._calls += 1
        if mode.inside:
            return self.forward(*args, **kwargs)
        if self.stages is not None:
            mode.cursor.move(planned_stage(self.stages, call, mode.cursor.stage), None)
        forward = self.of_all.around(self.module, self.forward)
        hooked = has_users_hooks(self.module)
        is_sealed = mode.next_hop() in mode.sealed.get(self.path, ())
        if hooked or not is_sealed:
            self.backward_hooks.check_code_between(self.module, self.path)
        if is_sealed:
            self.seen.sealed_begins()
            result = mode.apart(None, self.path, args, kwargs, forward, has_hooks=hooked)
            if any(value is not None for value in plain_values(result)):
                self.seen.count_sealed()
            return result
        return forward(*args, **kwargs)


def _is_single(mode: TapingMode, module: nn.Module) -> bool:
    """Whether a module that is called now may be one entry, which calls it with its hooks."""
    forward = module.__dict__.get("forward")
    is_sealed = isinstance(forward, _TapedForward) and forward.path in mode.sealed
    return is_sealed and not mode.inside and not has_users_hooks(module)


def has_users_hooks(module: nn.Module) -> bool:
    """Whether hooks other than a mark run around a module's forward."""
    hooks = [*forward_pre_hooks_of(module).values(), *forward_hooks_of(module).values()]
    theirs = [hook for hook in hooks if not isinstance(hook, OwnHook)]
    return len(theirs) > (mark_of(module) is not None)
