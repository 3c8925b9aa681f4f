"""The context managers that are entered around a step: changes to the model and to torch that hold
while it runs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from .._common.threads.model_turns import alone_stepping
from .._torch.compiler import compiler
from .._torch.graph import stepping_hooks
from ..crossing.torch_patches import (
    AsWritten,
    Backwards,
    CustomFunctions,
    FastPaths,
    ScriptFunctions,
    TensorHooks,
    UnseenOperations,
)
from ..crossing.user_checkpoints import Checkpoints
from .hook_steps import no_early_steps
from .step_request import StepRequest
from .step_state import StepState


@contextmanager
def around_cut_step(state: StepState) -> Iterator[None]:
    """Stand around a step, or a part of one, whose operations are intercepted."""
    request, prepared = state.request, state.request.prepared
    with ExitStack() as stack:
        stack.enter_context(alone_stepping())
        stack.enter_context(prepared.sealed_forwards)
        if prepared.batch_norm is not None:
            stack.enter_context(prepared.batch_norm.step())
        if state.context.graphs.split:
            stack.enter_context(TensorHooks())
        if prepared.compiled is not None:
            keeps_graphs = state.context.graphs.differentiable and "loss" not in request.want
            stack.enter_context(
                prepared.compiled.step(_in_flight(state), keeps_graphs=keeps_graphs)
            )
        for change in prepared.attributes.changes if state.uses is not None else ():
            stack.enter_context(change)
        stack.enter_context(Backwards())
        # Also where the recording has met none of these: a later forward may.
        stack.enter_context(CustomFunctions())
        stack.enter_context(ScriptFunctions())
        stack.enter_context(UnseenOperations())
        stack.enter_context(FastPaths())
        stack.enter_context(Checkpoints())
        if compiler() is not None:
            stack.enter_context(AsWritten())
        stack.enter_context(_current_device_kept(request))
        stack.enter_context(_no_early_steps(state))
        yield


@contextmanager
def around_plain_loop(state: StepState) -> Iterator[None]:
    """Stand around a step in which no operation is intercepted: only stand-ins for modules and
    the current device matter there, and mostly there are no stand-ins."""
    prepared = state.request.prepared
    with ExitStack() as stack:
        if prepared.compiled is not None or prepared.batch_norm is not None:
            stack.enter_context(around_cut_step(state))
        else:
            stack.enter_context(alone_stepping())
            stack.enter_context(_current_device_kept(state.request))
            stack.enter_context(_no_early_steps(state))
        if prepared.planned:
            stack.enter_context(prepared.sealed_forwards.following)
        yield


def _no_early_steps(state: StepState) -> AbstractContextManager[None]:
    """Stand around a step whose micro-batches are under way at once. Which step of a small model
    runs as the plain loop is no reason to let it step in the backward, and the next one not."""
    request = state.request
    if request.schedule in ("sequential", "uncut"):
        return nullcontext()
    homes = request.prepared.homes.values()
    stepping = [home.tensor for home in homes if stepping_hooks(home.tensor)]
    return no_early_steps(stepping, len(request.microbatches)) if stepping else nullcontext()


def _in_flight(state: StepState) -> int:
    """The most micro-batches that are under way at once in steps like this one."""
    if state.mode.one_by_one:
        return 1
    request = state.request
    return request.prepared.schedule(request.schedule, len(request.microbatches)).in_flight()


def _current_device_kept(request: StepRequest) -> AbstractContextManager[None]:
    """Leave the caller's thread on the accelerator that it was on."""
    return _device_kept() if request.prepared.is_asynchronous else nullcontext()


@contextmanager
def _device_kept() -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)
