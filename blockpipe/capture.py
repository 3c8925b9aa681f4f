"""The recording pass: one micro-batch's forward, run once to be watched.

With fake tensors it takes no device memory and does no arithmetic; where a model reads values
(``if x.sum() > 0``), it runs for real. The model is left as it was.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from .activations import Activations
from .ambient import as_ours, theirs
from .blocks import set_cursor
from .crossing import Step
from .doors import is_compiled
from .errors import BlockpipeError, IsolationError, RecordingError
from .meter import Meter
from .plan import StagePlan
from .planned import Planned, planned_by
from .progress import Progress
from .randomness import every_source, kept
from .recorder import (
    FreeRecorder,
    Recorder,
    RecordingDoor,
    RecordingGlue,
    WatchedCursor,
    hold,
    named_slots,
)
from .recording import Hop, Recording
from .rerun import intercepting
from .sealing import conclude
from .snapshot import ModelState
from .transfer import carry, is_on_meta
from .tree import map_tensors, tensors
from .where import failing_line, users_line

_log = logging.getLogger(__name__)


def record(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fake: bool = True,
    plan: StagePlan | None = None,
    devices: list[torch.device] | None = None,
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
        plan: stages that override the marks, and a plan that was set on the model, or inside of it.
        devices: where the stages of a placed model are.
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
        raise RecordingError(
            f"record takes an nn.Module, but {type(model).__name__} came ({users_line()})"
        )
    planned = planned_by(model, plan)
    return record_planned(model, args, kwargs, planned, fake=fake, devices=devices, cut=cut)


def record_planned(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    planned: Planned | None,
    *,
    fake: bool = True,
    devices: list[torch.device] | None = None,
    cut: bool = True,
) -> Recording:
    """As :func:`record`, by a plan that is resolved, and checked against what it gives."""
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    kwargs = dict(kwargs or {})
    recording = _record(model, tuple(args), kwargs, planned, devices, fake=fake, cut=cut)
    if planned is not None:
        planned.check(recording)
    return recording


@as_ours
def _record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    planned: Planned | None,
    devices: list[torch.device] | None,
    *,
    fake: bool,
    cut: bool,
) -> Recording:
    """Record with fake tensors, or for real where that does not go."""
    why_real: str | None = None
    began = time.perf_counter()
    if fake:
        try:
            recording = _record_anywhere(model, args, kwargs, planned, devices, cut=cut)
            _tell(recording, args, kwargs, began)
            return recording
        except BlockpipeError:
            raise
        except Exception as error:
            if is_on_meta(model):
                raise RecordingError(
                    f"{type(model).__name__}'s forward does not run on fake tensors made from the "
                    f"sample ({_signature(args, kwargs)}), and on the meta device it cannot run "
                    f"for real: {type(error).__name__}: {error}"
                ) from error
            why_real = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    recording = _hooked(
        lambda unhookable: _record_real(
            model, args, kwargs, planned, devices, cut=cut, unhookable=unhookable
        )
    )
    recording.why_real = why_real
    _tell(recording, args, kwargs, began)
    return recording


def _tell(recording: Recording, args: Any, kwargs: Mapping[str, Any], began: float) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    _log.info(
        "recorded %s(%s) in %.2f s%s: %d module calls, route %s, %d crossings, %d sealed modules",
        recording.model,
        _signature(args, dict(kwargs)),
        time.perf_counter() - began,
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


@as_ours
def record_on_fake_devices(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    placed: Recording,
    devices: list[torch.device],
    plan: StagePlan | None = None,
) -> Recording:
    """Record with every tensor on a fake device of its stage; they need not be there.

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
    planned = planned_by(model, plan)
    kwargs = dict(kwargs or {})
    try:
        return _hooked(
            lambda unhookable: _record_fake(
                model, tuple(args), kwargs, planned, devices, homes, unhookable=unhookable
            )
        )
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
            f"({_signature(args, kwargs)}): {type(error).__name__}: {error}; a model that reads "
            "values can be checked by Pipeline(..., isolate=True)"
        ) from error


def _is_device_mismatch(error: Exception) -> bool:
    # A class of its own since torch 2.12 or so; before, a RuntimeError with these words.
    known = ("found two different devices", "found at least two devices")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in known)


def _record_anywhere(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    planned: Planned | None,
    devices: list[torch.device] | None,
    *,
    cut: bool,
) -> Recording:
    """Record with fake tensors; a model that was placed for another plan as if it were whole."""

    def attempt(homes: Mapping[str, torch.device] | None) -> Recording:
        return _hooked(
            lambda unhookable: _record_fake(
                model, args, kwargs, planned, devices, homes, cut=cut, unhookable=unhookable
            )
        )

    try:
        return attempt(None)
    except Exception as error:
        if devices is not None or not _is_device_mismatch(error):
            raise
        slots = ("_parameters", "_buffers")
        names = [name for slot in slots for name, _ in named_slots(model, slot)]
        return attempt(dict.fromkeys(names, torch.device("cpu")))


def _record_fake(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    planned: Planned | None,
    devices: list[torch.device] | None,
    homes: Mapping[str, torch.device] | None = None,
    *,
    cut: bool = True,
    unhookable: frozenset[str],
) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def faked(tensor: Tensor, device: torch.device | None = None) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        found = fakes.get(id(tensor))
        if found is None:
            if device is None and tensor.is_meta:
                device = torch.device("cpu")  # so that what the forward makes itself fits in
            if device is None:
                found = mode.from_tensor(tensor)
            else:
                with mode, torch.no_grad():
                    moved = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )
                found = moved.requires_grad_(tensor.requires_grad)
                if isinstance(tensor, nn.Parameter):
                    found = nn.Parameter(found, tensor.requires_grad)
            fakes[id(tensor)] = found
        return found

    state = ModelState(model, values=False)
    on_meta = is_on_meta(model)
    swapped = {
        name: faked(tensor, None if homes is None else homes.get(name))
        for name, tensor in (*named_slots(model, "_parameters"), *named_slots(model, "_buffers"))
    }
    try:
        with kept(every_source()), _reparametrize_module(model, swapped, tie_weights=False):
            # There a model takes any sample: only its shapes count.
            in_one_place = on_meta or (homes is not None and devices is None)
            sample_device = torch.device("cpu") if in_one_place else None
            fake_args, fake_kwargs = map_tensors(lambda t: faked(t, sample_device), (args, kwargs))
            with mode:
                return _run(
                    model,
                    fake_args,
                    fake_kwargs,
                    planned,
                    devices,
                    fake=True,
                    cut=cut,
                    unhookable=unhookable,
                )
    finally:
        state.restore()


def _record_real(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    planned: Planned | None,
    devices: list[torch.device] | None,
    *,
    cut: bool,
    unhookable: frozenset[str],
) -> Recording:
    state = ModelState(model, values=True)
    try:
        with kept(every_source()):
            # Copies: the forward may write to its inputs, and it will run again.
            args, kwargs = map_tensors(_copy_of, (args, kwargs))
            return _run(
                model, args, kwargs, planned, devices, fake=False, cut=cut, unhookable=unhookable
            )
    except (BlockpipeError, HooksRefusedError):
        raise
    except Exception as error:
        raise RecordingError(
            f"{type(model).__name__}'s forward fails on the sample ({_signature(args, kwargs)}): "
            f"{type(error).__name__}: {error}; pass what the forward takes"
        ) from error
    finally:
        state.restore()


def _copy_of(tensor: Tensor) -> Tensor:
    return carry(tensor, None, copy=True).requires_grad_(tensor.requires_grad)


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    planned: Planned | None,
    devices: list[torch.device] | None,
    *,
    fake: bool,
    cut: bool,
    unhookable: frozenset[str],
) -> Recording:
    result = Recording(type(model).__name__, fake, planned=planned is not None)
    result.planned_at = None if planned is None else planned.where
    cursor = WatchedCursor(follow_marks=planned is None)
    stages = {} if planned is None else planned.stages
    differentiable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    step = Step([], {}, devices, differentiable=differentiable, cut=cut, splits=True)
    result.unhookable = sorted(unhookable)
    activations = Activations([*model.parameters(), *model.buffers()])
    kind = Recorder if cut else FreeRecorder
    recorder = kind(step, cursor, result, activations, unhookable)
    recorder.compiled = {path for path, m in model.named_modules() if is_compiled(m)}
    hold(model, recorder)
    versions = {id(b): (b, b._version) for b in model.buffers() if not b.is_inference()}
    for path, module in model.named_modules():
        names = module.__dict__
        names["forward"] = RecordingDoor(module.forward, path, module, recorder, stages.get(path))
        names.pop("_compiled_call_impl", None)
    before = set_cursor(cursor)
    try:
        args, kwargs = _as_inputs(recorder, (args, kwargs))
        meter = Meter(
            recorder.spent, recorder.waited, recorder.drew, recorder.wrote, recorder.given
        )
        modules = sum(1 for _ in model.modules())
        with Progress(f"recording {result.model}", modules, "module calls") as recorder.progress:
            with intercepting(), _eager(), _saving_watched(recorder):
                with theirs(), RecordingGlue(recorder), meter:
                    output = model(*args, **kwargs)
                recorder.notice_writes()
                for tensor in tensors(output):
                    recorder.newest(tensor)
        recorder.note_whole(output)
        recorder.keepers = _keepers(model, recorder)
    finally:
        set_cursor(before)
        recorder.abandon()
    if not result.hops:
        result.hops.append(Hop(0, 0, None, "the start"))
    try:
        conclude(model, recorder, versions)
    finally:
        activations.forget()
    return result


class HooksRefusedError(Exception):
    """A module's forward, or a function, that cannot run under saved-tensor hooks."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def _hooked(attempt: Callable[[frozenset[str]], Recording]) -> Recording:
    """Record, without saved-tensor hooks in those calls that turn out not to bear them."""
    unhookable: frozenset[str] = frozenset()
    while True:
        try:
            return attempt(unhookable)
        except HooksRefusedError as refused:
            unhookable |= {refused.path}


@contextlib.contextmanager
def _saving_watched(recorder: Recorder) -> Iterator[None]:
    recorder.begin()
    try:
        yield
    except RuntimeError as error:
        call = recorder.failed_in
        path = "" if call is None else call.path
        if "support saved tensor hooks" in str(error) and path not in recorder.unhookable:
            raise HooksRefusedError(path) from error
        raise
    finally:
        recorder.end()


def _keepers(model: nn.Module, recorder: Recorder) -> list[str]:
    """Modules on which the forward left a tensor with a gradient path: the next micro-batch will
    read it there, so their calls are looked into."""
    return [
        path
        for path, module in model.named_modules()
        for value in module.__dict__.values()
        if isinstance(value, Tensor | list | tuple)
        and any(t.requires_grad and recorder.made(t) for t in tensors(value))
    ]


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled modules run as they were written, so that their marks and reads are seen."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _as_inputs(recorder: Recorder, value: Any) -> Any:
    """Inputs are made on hop 0, before there is one: tagged so, on stage 0's device."""
    memo: dict[int, Tensor] = {}

    def taken(tensor: Tensor) -> Tensor:
        if id(tensor) in recorder.held:
            return tensor
        if id(tensor) not in memo:
            memo[id(tensor)] = recorder.take_input(tensor)
        return memo[id(tensor)]

    inputs = map_tensors(taken, value)
    recorder.activations.inputs(memo.values())
    return inputs


def _signature(args: Any, kwargs: Any) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value)[:40]

    parts = [shown(a) for a in args] + [f"{k}={shown(v)}" for k, v in kwargs.items()]
    return ", ".join(parts)
