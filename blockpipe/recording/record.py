"""The recording pass: one micro-batch's forward, run once to be watched.

With fake tensors it takes no device memory and does no arithmetic; where a model reads values
(``if x.sum() > 0``), it runs for real. The model is left as it was.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._common.checks import expected
from .._common.hints import knows_other_names
from .._common.threads.thread_state import as_ours
from .._torch.modules import is_compiled
from ..batches.microbatch import BatchPart
from ..batches.shared_memory import map_sharing
from ..devices.copies import carry
from ..devices.devices import is_on_meta
from ..devices.gathered import gathered
from ..devices.rng_streams import SettingGenerators, every_source, preserve_rng
from ..errors import BlockpipeError, RecordingError
from ..restoring.holders import Holder
from ..restoring.kept_imports import kept_imports
from ..restoring.model_state import ModelState
from ..restoring.restored_thread import leaves_intact, modes_around
from ..restoring.writes_undone import WritesUndone
from ..stages.plan import StagePlan
from .fake_run import record_there
from .held_output import HeldOutput, UsersListeners
from .plain_values.still_code import hooks_in
from .plan_resolution import planned_by
from .recording import Recording
from .sample import RecordRequest, check_initialized, remedy, signature, what_failed
from .second_run import looked_at_twice
from .watching.closed_modules import closed_to_others
from .watching.saved_tensors import hooked
from .watching.watched_run import counting_writes, run_watched

_log = logging.getLogger(__name__)

R = TypeVar("R")


@knows_other_names(sample="pass args=, the forward's arguments")
def record(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fake: bool = True,
    plan: StagePlan | None = None,
    devices: list[torch.device] | None = None,
    intended: Sequence[torch.device] | None = None,
    cut: bool = True,
) -> Recording:
    """Run a model's forward once and write down what is on which stage.

    The model is left as it was: parameters, buffers, attributes, random states.

    Args:
        model: a marked model (or an unmarked one: everything is on stage 0). On the meta device
            too.
        args: the forward's positional arguments; a single tensor may come bare.
        kwargs: its keyword arguments.
        fake: use fake tensors: no device memory, no arithmetic. A model that reads values is run
            for real instead, and :attr:`Recording.why_real` says what it asked for; with
            ``False`` it runs for real at once.
        plan: stages that override the marks, and a plan that was set on the model, or inside of it:
            of each call that the forward makes, or only where stages begin.
        devices: where the stages of a placed model are.
        intended: where they will be, of a model that is not placed yet, by devices of this machine:
            the fake tensors are on such devices. Kernels differ by device (of attention, dropout,
            batch norm), and so does what they save for the backward.
        cut: whether autograd is cut between the stages, as all schedules but ``"uncut"`` do.

    Returns:
        A :class:`Recording`.

    Raises:
        RecordingError: the forward does what no pipeline can do, or does not run on the sample
            (then with the forward's own error as its cause).
        PlanError: the plan names a module that is not there, or does not fit the forward; plans set
            on two models inside, or on one with marks outside of it.

    Example:
        >>> import torch, blockpipe as bp
        >>> print(bp.record(torch.nn.Linear(4, 2), torch.zeros(1, 4)).route)
        [0]
    """
    if not isinstance(model, nn.Module):
        raise RecordingError(expected("an nn.Module", model, for_="model"))
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    planned = planned_by(model, plan)
    given = model, tuple(args), dict(kwargs or {}), planned, devices, cut
    recording = record_planned(RecordRequest(*given, fakes=fake), intended=intended)
    recording.way = None  # which holds the model's objects
    return recording


def record_planned(
    request: RecordRequest,
    *,
    intended: Sequence[torch.device] | None = None,
    share: BatchPart | None = None,
) -> Recording:
    """Record as :func:`record` does, and check the plan against the recording.

    Args:
        request: the forward, with a plan that is resolved.
        intended: where the stages will be, as in :func:`record`.
        share: which part of a batch the arguments are, where a batch was split.
    """
    check_initialized(request.model)
    with closed_to_others(request.model):
        recording = _record(request, share, intended)
    if any(map(is_compiled, request.model.modules())):
        recording.way = None  # in steps other code runs
    if request.planned is not None:
        request.planned.check(recording)
    return recording


@leaves_intact
@as_ours
@counting_writes()
def _record(
    request: RecordRequest,
    share: BatchPart | None,
    intended: Sequence[torch.device] | None,
) -> Recording:
    with request.signals, SettingGenerators(sets=True), request.undone:
        # What the forward sets in context variables stays in this copy.
        run = partial(_recorded, request, share, intended)
        return contextvars.copy_context().run(run)


def _recorded(
    request: RecordRequest,
    share: BatchPart | None,
    intended: Sequence[torch.device] | None,
) -> Recording:
    """Record with fake tensors, or for real where that fails."""
    began = time.perf_counter()
    sample = request.model, request.args, request.kwargs
    why_real: str | None = None
    recording: Recording | None = None
    if request.fakes:
        on_meta = is_on_meta(request.model)
        try:
            with HeldOutput(lambda e: on_meta or isinstance(e, BlockpipeError) or _stops(e)):
                recording = record_there(request, intended)
        except BlockpipeError:
            raise
        except Exception as error:
            if on_meta:
                raise RecordingError(
                    f"{what_failed(*sample, share)} as fake tensors, and on the meta "
                    f"device it cannot run for real: {type(error).__name__}: {error}; "
                    f"{remedy(error, *sample, share)}"
                ) from error
            why_real = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if recording is None:
        try:
            with HeldOutput(lambda _: True):
                recording = hooked(lambda paths: _record_real(replace(request, unhookable=paths)))
        except BlockpipeError:
            raise
        except Exception as error:
            raise RecordingError(
                f"{what_failed(*sample, share)}: {type(error).__name__}: {error}; "
                f"{remedy(error, *sample, share)}"
            ) from error
        recording.why_real = why_real
    _log_recorded(recording, request, time.perf_counter() - began)
    return recording


def _stops(error: BaseException) -> bool:
    """Return whether no real run follows such an error."""
    return not isinstance(error, Exception)


def _log_recorded(recording: Recording, request: RecordRequest, seconds: float) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    _log.info(
        "recorded %s(%s) in %.2f s%s: %d module calls, route %s, %d crossings, %d sealed modules",
        recording.model,
        signature(request.args, request.kwargs),
        seconds,
        "" if recording.fake else " for real",
        len(recording.calls),
        recording.route,
        len(recording.crossings),
        len(recording.sealed),
    )
    if recording.why_real is not None:
        _log.info("it ran for real, for on fake tensors it fails: %s", recording.why_real)
    for path in recording.unhookable:
        _log.debug("%s does not bear saved-tensor hooks", path or "the model")
    for hop in recording.hops:
        _log.debug(
            "hop %d on stage %d: %d operations, %.3g FLOPs, keeps %d bytes a micro-batch%s (%s)",
            hop.index,
            hop.stage,
            hop.operations,
            hop.flops,
            hop.never.bytes,
            f", its backward is whole: {hop.whole}" if hop.whole else "",
            hop.where,
        )


def _record_real(request: RecordRequest) -> Recording:
    with gathered(request.model) if request.devices is None else nullcontext():
        return run_for_real(request, _watched_twice)


def _watched_twice(request: RecordRequest, holders: list[Holder]) -> Recording:
    run = partial(run_watched, request, fake=False, holders=holders)
    try:
        return looked_at_twice(run, request.crossed)
    finally:
        request.crossed.forget()


def run_for_real(request: RecordRequest, watch: Callable[[RecordRequest, list[Holder]], R]) -> R:
    """Watch a forward on real tensors, and put everything back.

    Args:
        request: the forward.
        watch: runs it, given the forward with copies of its arguments and the user's objects that
            the model reaches.

    Returns:
        The result of ``watch``.
    """
    model, args, kwargs = request.model, [*request.args], {**request.kwargs}
    state = ModelState(model, values=True, others=[args, kwargs])  # iterators in them are lent
    modes = ModelState(values=False, others=modes_around())
    handlers = UsersListeners()
    # What is beside comes last: while the forward ran, the state of the model may have come upon it
    # too.
    for each in (handlers, modes, state):
        request.undone.callback(each.restore_again)
    undone = WritesUndone(model, state.tensors_beside())
    request.states.extend((modes, state))
    imports = kept_imports(request.states)
    with handlers, modes, state, imports, preserve_rng(every_source()), undone:
        # Copies: the forward may write to its inputs, and it will run again.
        where = _one_device_of(model) if request.devices is None else None
        copied = partial(_copy_of, where=where)
        given, named = map_sharing(copied, (tuple(args), kwargs))
        hooks = hooks_in(model)
        beside = [*modes.holders, *handlers.holders]
        request = replace(request, args=given, kwargs=named, hooks=hooks, modes=beside)
        return watch(request, state.holders)


def _one_device_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model that is not spread out yet; a batch that is elsewhere goes
    there."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return devices.pop() if len(devices) == 1 else None


def _copy_of(tensor: Tensor, where: torch.device | None) -> Tensor:
    return carry(tensor, where, copy=True).requires_grad_(tensor.requires_grad)
