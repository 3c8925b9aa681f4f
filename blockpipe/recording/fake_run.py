"""A forward recorded on fake tensors: no device memory, no arithmetic, and no device either.

They are on the kind of device that the stages will be on, if it is known and this machine has it:
kernels differ by device, and so does what autograd saves for them.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._common.callsite import failing_line
from .._common.modules import call_with_tensors, named_slots
from .._common.threads.thread_state import CallerState, as_ours
from .._torch.modules import buffers_of, parameters_of
from .._torch.tensors import FAKE_TENSOR_LOG, FakeTensor
from ..batches.shared_memory import map_sharing
from ..crossing.tensors.tensor_attributes import share_attributes
from ..crossing.torch_patches import NoElements
from ..devices.devices import is_on_meta
from ..devices.rng_streams import every_source, preserve_rng
from ..errors import BlockpipeError, IsolationError, RecordingError
from ..restoring.holders import Holder
from ..restoring.kept_imports import kept_imports
from ..restoring.leaked_tensors import TrackedFakes
from ..restoring.model_state import ModelState
from ..restoring.restored_thread import leaves_intact, modes_around
from ..restoring.writes_undone import RealWritesUndone
from ..stages.plan import StagePlan
from .held_output import HeldOutput, UsersListeners
from .plain_values.still_code import hooks_in
from .plan_resolution import planned_by
from .recording import Recording
from .sample import RecordRequest, signature
from .second_run import looked_at_twice
from .watching.closed_modules import closed_to_others
from .watching.failed_threads import FailedThreads
from .watching.saved_tensors import hooked
from .watching.watched_run import counting_writes, run_watched

R = TypeVar("R")


@leaves_intact
@as_ours
@counting_writes()
def record_on_fake_devices(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    placed: Recording,
    devices: list[torch.device],
    plan: StagePlan | None = None,
) -> Recording:
    """Record with every tensor on a fake device of its stage; the devices need not be there.

    Args:
        model: as for :func:`record`.
        args: as for :func:`record`.
        kwargs: as for :func:`record`.
        placed: an earlier recording: says which stage each parameter lives on.
        devices: one for each stage.
        plan: stages that override the marks.

    Raises:
        IsolationError: an operation got tensors of two devices.
        RecordingError: the forward does not run on fake tensors.
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    homes = {
        name: devices[held.stage]
        for held in (*placed.parameters, *placed.buffers)
        for name in held.names
    }
    kwargs = dict(kwargs or {})
    request = RecordRequest(model, tuple(args), kwargs, planned_by(model, plan), devices)
    held = HeldOutput(lambda _: True)
    try:
        with closed_to_others(model), request.signals, request.undone, held:
            return contextvars.copy_context().run(_hooked_fake, request, homes)
    except BlockpipeError:
        raise
    except Exception as error:
        if _is_device_mismatch(error):
            raise IsolationError(
                f"on one device a stage this forward mixes devices: {error} "
                f"({failing_line(error.__traceback__)}); create tensors with device=x.device, and "
                "register constants as buffers"
            ) from error
        raise RecordingError(
            f"{type(model).__name__}'s forward does not run on fake tensors "
            f"({signature(args, kwargs)}): {type(error).__name__}: {error}; a model that reads "
            "values can be checked by Pipeline(..., isolate=True)"
        ) from error


def _is_device_mismatch(error: Exception) -> bool:
    # A class of its own since torch 2.12 or so; before, a RuntimeError with these words.
    known = ("found two different devices", "found at least two devices")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)


def record_there(request: RecordRequest, intended: Sequence[torch.device] | None) -> Recording:
    """Record with fake tensors on the kind of device that the stages will be on, or else where the
    model is.

    Args:
        request: the forward.
        intended: where the stages will be, if it is known.
    """
    model = request.model
    here = partial(_record_anywhere, request)
    kinds = {device.type for device in intended or ()}
    own = {t.device.type for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    if request.devices is not None or not intended or kinds == (own or {"cpu"}) == {"cpu"}:
        return here()
    slots = (parameters_of, buffers_of)
    names = [name for slot in slots for name, _ in named_slots(model, slot)]
    homes, places, first = dict.fromkeys(names, intended[0]), None, None
    if len(kinds) > 1:  # which of them each parameter is on depends on its stage
        first, places = here(), list(intended)
        if first.num_stages > len(places):
            return first
        held = (*first.parameters, *first.buffers)
        homes = {name: places[h.stage] for h in held for name in h.names}
    try:
        return _hooked_fake(replace(request, devices=places), homes, intended[0])
    except BlockpipeError:
        raise
    except Exception as error:
        found = first or here()
        found.why_elsewhere = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return found


def _record_anywhere(request: RecordRequest) -> Recording:
    """Record with fake tensors. A model that was placed for another plan is recorded as if it were
    whole, and one that was placed for another kind of call, which reads a parameter on another
    stage first or not at all, as if it were placed for this one."""
    model, devices = request.model, request.devices
    try:
        return _hooked_fake(request)
    except Exception as error:
        if not _is_device_mismatch(error):
            raise
        slots = (parameters_of, buffers_of)
        names = [name for slot in slots for name, _ in named_slots(model, slot)]
        in_one_place = dict.fromkeys(names, torch.device("cpu"))
        whole = _hooked_fake(replace(request, devices=None), in_one_place)
        if devices is None or whole.num_stages > len(devices):
            return whole
        held = (*whole.parameters, *whole.buffers)
        homes = {name: devices[h.stage] for h in held for name in h.names}
        return _hooked_fake(request, homes)


def _hooked_fake(
    request: RecordRequest,
    homes: Mapping[str, torch.device] | None = None,
    sample_device: torch.device | None = None,
) -> Recording:
    """Record with fake tensors, without saved-tensor hooks where they are refused.

    Args:
        request: the forward.
        homes: by name, the device of each parameter and buffer; ``None``: where they are.
        sample_device: the device of the sample; ``None``: where it is.
    """

    def attempt(unhookable: frozenset[str]) -> Recording:
        hooked_request = replace(request, unhookable=unhookable)
        return run_on_fakes(hooked_request, _watched_twice, homes, sample_device)

    return hooked(attempt)


def _watched_twice(request: RecordRequest, holders: list[Holder]) -> Recording:
    run = partial(run_watched, request, fake=True, holders=holders)
    try:
        return looked_at_twice(run, request.crossed)
    finally:
        request.crossed.forget()


class _Fakes:
    """The fake tensors of one recording: one for each real one.

    Args:
        mode: makes them.
    """

    def __init__(self, mode: TrackedFakes) -> None:
        self._mode = mode
        self._made: dict[int, Tensor] = {}  # by the id of the real one

    def of(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the fake tensor that stands for a real one, on a device or where the real one
        is."""
        if isinstance(tensor, FakeTensor):
            return tensor
        found = self._made.get(id(tensor))
        if found is None:
            if device is None and tensor.is_meta:
                device = torch.device("cpu")  # so that what the forward makes itself fits in
            found = self._made[id(tensor)] = self._make(tensor, device)
            share_attributes(tensor, found, frozenset(found.__dict__))
        return found

    def _make(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        if device is None:
            return self._mode.from_tensor(tensor)
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            with torch.no_grad():
                found = self._mode.from_tensor(tensor).to(device)
            return found.requires_grad_(tensor.requires_grad)
        with self._mode, torch.no_grad():
            moved = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        found = moved.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, tensor.requires_grad)
        return found


def run_on_fakes(
    request: RecordRequest,
    watch: Callable[[RecordRequest, list[Holder]], R],
    homes: Mapping[str, torch.device] | None = None,
    sample_device: torch.device | None = None,
) -> R:
    """Watch a forward while all that it is given is fake, and put everything back.

    Args:
        request: the forward.
        watch: runs it, given the forward with fake arguments and the user's objects that the
            model reaches.
        homes: by name, the device of each parameter and buffer; ``None``: where they are.
        sample_device: the device of the sample; ``None``: where it is.

    Returns:
        The result of ``watch``.
    """
    _begin_autograd()
    mode = TrackedFakes()
    # Autocast would keep its casts of fake weights. Steps run without that cache too.
    with CallerState().uncached_autocast():
        result = _with_fakes(mode, request, watch, homes, sample_device)
    mode.check_nothing_is_left()
    return result


@functools.cache
def _begin_autograd() -> None:
    """Run a first backward, on a machine without accelerators.

    There fake tensors tell torch that it has eight of them. At the first backward of the process,
    torch would start a thread for each, and refuse every backward of a process forked later. The
    backward is a thread's, for nothing of the caller's state is on there.
    """
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        return  # it starts its threads at the first backward in any case

    def first() -> None:
        torch.ones((), requires_grad=True).backward()

    thread = threading.Thread(target=first, name="blockpipe first backward", daemon=True)
    thread.start()
    thread.join()


def _with_fakes(
    mode: TrackedFakes,
    request: RecordRequest,
    watch: Callable[[RecordRequest, list[Holder]], R],
    homes: Mapping[str, torch.device] | None,
    sample_device: torch.device | None,
) -> R:
    model, fakes = request.model, _Fakes(mode)
    args, kwargs = [*request.args], {**request.kwargs}
    state = ModelState(model, values=False, others=[args, kwargs])  # iterators in them are lent
    on_meta = is_on_meta(model)
    real = dict((*named_slots(model, parameters_of), *named_slots(model, buffers_of)))
    swapped = {
        name: fakes.of(tensor, None if homes is None else homes.get(name))
        for name, tensor in real.items()
    }
    modes, listeners = ModelState(values=False, others=modes_around()), UsersListeners()
    beside = [*modes.holders, *listeners.holders]
    stand_ins = {id(tensor): swapped[name] for name, tensor in real.items()}
    request = replace(request, stand_ins=stand_ins, hooks=hooks_in(model), modes=beside)
    with ExitStack() as stack:
        stack.callback(mode.empty_caches, state.caches)  # also if it is to be run for real now
        # What is beside is restored last: while the forward ran, the state of the model may have
        # come upon it too.
        for each in (listeners, modes, state):
            stack.enter_context(each)
            request.undone.callback(each.restore_again)
        request.states.extend((modes, state))
        stack.enter_context(kept_imports(request.states))
        stack.enter_context(preserve_rng(every_source()))
        # There a model takes any sample: only its shapes count.
        in_one_place = on_meta or (homes is not None and request.devices is None)
        if sample_device is None and in_one_place:
            sample_device = torch.device("cpu")
        given, named = map_sharing(lambda t: fakes.of(t, sample_device), (tuple(args), kwargs))
        faked = replace(request, args=given, kwargs=named)

        def run() -> R:
            mode.failed = request.failed
            try:
                with mode, _quiet(), RealWritesUndone(), FailedThreads(), NoElements():
                    found = watch(faked, state.holders)
                for error in () if on_meta else request.failed:
                    raise error  # which the forward has caught
                return found
            finally:  # its frames have the graph, which leads to the mode: nobody could free that
                request.failed.clear()

        return call_with_tensors(model, swapped, run)


class _OtherThreadsOnly(logging.Filter):
    """A filter that lets through what other threads log."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self._thread


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging, while entered, what this thread's fake tensors cannot do. Either
    that is raised, and then said once, or the forward runs for real."""
    logger, filter_ = logging.getLogger(FAKE_TENSOR_LOG), _OtherThreadsOnly()
    logger.addFilter(filter_)
    try:
        yield
    finally:
        logger.removeFilter(filter_)
