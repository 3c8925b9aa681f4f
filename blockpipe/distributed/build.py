"""Build the modules of a marked model's stages from a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import remembers_caller, users_line
from .._common.modules import named_slots
from .._common.threads.thread_state import as_ours
from .._torch.modules import buffers_of, parameters_of
from ..batches.microbatch import Microbatch
from ..devices.devices import is_on_meta
from ..devices.gathered import move_data
from ..errors import BlockpipeError, PlanError, RecordingError, StateError
from ..preparation.sealed_forwards import recompute_spec
from ..recording.fake_run import run_on_fakes
from ..recording.plan_resolution import planned_by
from ..recording.record import record_planned, run_for_real
from ..recording.recording import Recording
from ..recording.sample import RecordRequest
from ..recording.watching.closed_modules import closed_to_others
from ..recording.watching.watched_run import counting_writes
from ..restoring.holders import Holder
from ..restoring.restored_thread import leaves_intact
from ..stages.plan import StagePlan, gaps
from ..weights.materialize import Init, materialize
from ..weights.sources import Weights
from .cutting import StageTape, cut, questions
from .microbatches.streams import drawn_sources
from .replay import StageModule
from .taping.origins import digest
from .taping.tape import REMEDY, Tape
from .taping.taping import taped


class CutForward:
    """A forward of a model, recorded, taped and cut: the same data in every process.

    Args:
        model: the user's model; marked, unless there is a plan.
        args: the forward's positional arguments, of one micro-batch.
        kwargs: its keyword arguments.
        plan: stages that override the marks.
        device: the device of this process's stages.

    Attributes:
        recording: the recording, with the stage of each call.
        tape: the calls of the glue.
        stages: the pieces of the tape, one for each hop of the route.
        sources: the generators that it draws random numbers from.
        digest: what tells the calls of the glue from others.

    Raises:
        RecordingError: the forward's glue does what cannot be run again from a tape.
        CrossingError: tensors cross in a way that processes cannot follow.
        StateError: stages share state that the forward changes.
        PlanError: the stages are no chain.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        plan: StagePlan | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.device = device or torch.device("cpu")
        kwargs = dict(sorted(kwargs.items()))
        self._planned = planned_by(model, plan)
        self._intended = None if self.device.type == "cpu" else [self.device]
        request = RecordRequest(model, args, kwargs, self._planned)
        with _other_remedies():
            self.recording = record_planned(request, intended=self._intended)
            _check(self.recording)
            self.tape = _taped(request, self.recording)
        _check_glue(self.recording)
        self.stages = cut(self.tape)
        self.digest = digest(self.tape)
        held = (*self.recording.parameters, *self.recording.buffers)
        kinds = {kind for hop in self.recording.hops for kind in hop.draws}
        self.sources = drawn_sources(kinds, self.device)
        self._names = {h.name: h.names for h in held}

    def check_loss(self, microbatch: Microbatch, loss_fn: Callable[..., Any]) -> None:
        """Record once more, with what the loss reads and sets beside the forward.

        Raises:
            StateError: it shares that with another stage, in another process.
        """
        given = microbatch.args, dict(sorted(microbatch.kwargs.items())), self._planned
        request = RecordRequest(self.model, *given, loss_fn=loss_fn)
        with _other_remedies():
            _check(record_planned(request, intended=self._intended))

    def module(self, index: int) -> StageModule:
        """Make the module of one stage; it is on the device that its parameters are on."""
        stage = self.stages[index]
        others = self._others(stage)
        module = StageModule(self.model, self.tape, stage, self._names, others, self.device)
        modules = dict(self.model.named_modules())
        for path in stage.modules:
            spec = recompute_spec(f"module {path!r}", path, self.recording, modules)
            if spec is not None:
                module.recomputable[path] = spec
        return module

    def answers(self) -> str:
        """Return what the forward has asked about its arguments, with the answers, in words."""
        asked = (entry for entry in self.tape.entries if entry.answer is not None)
        return ", ".join(f"{entry.name} ({entry.where}): {entry.answer}" for entry in asked)

    def questions(self) -> StageModule | None:
        """Make the module that asks again what the forward has asked about its arguments."""
        asked = questions(self.tape)
        if asked is None:
            return None
        return StageModule(self.model, self.tape, asked, self._names, [], self.device)

    def place(self, index: int) -> None:
        """Move the tensors of one stage to its device, in the model itself, so that modules built
        later share them. Tensors without values stay as they are."""
        with torch.inference_mode(False):  # they are trained later, whatever this call is under
            self._place(self.module(index))

    def _place(self, found: nn.Module) -> None:
        for _, weight in found.named_parameters():
            if weight.device != self.device and not weight.is_meta:
                move_data(weight, self.device)
        for name, buffer in found.named_buffers(remove_duplicate=False):
            if buffer.device != self.device and not buffer.is_meta:
                path, _, key = name.rpartition(".")
                buffers_of(self.model.get_submodule(path))[key] = buffer.to(self.device)

    def parameters_of(self, index: int) -> set[str]:
        """Return the first names of the parameters that a stage has."""
        stage = self.stages[index]
        first = {id(t): name for name, t in reversed([*named_slots(self.model, parameters_of)])}
        found = {name for name in (*stage.held, *self._others(stage)) if name in first.values()}
        for path in stage.modules:
            for tensor in self.model.get_submodule(path).parameters():
                found.add(first[id(tensor)])
        return found

    def homes(self) -> dict[str, set[int]]:
        """Return the stages that have each parameter and buffer, also those that no call reads."""
        numbers = [stage.stage for stage in self.stages]
        held = (*self.recording.parameters, *self.recording.buffers)
        return {
            h.name: {numbers.index(h.stage)} if h.hop is None else set(h.hops)
            for h in held
            if h.hop is not None or h.stage in numbers
        }

    def changing(self) -> list[str]:
        """Return what is read and that training changes: parameters, and buffers with writes."""
        held = (*self.recording.parameters, *self.recording.buffers)
        return [h.name for h in held if h.hop is not None and (h.trainable or h.written)]

    def tied(self) -> dict[str, list[int]]:
        """Return the stages of each parameter that several stages have, by its first name."""
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in self.parameters_of(stage.index):
                found.setdefault(name, []).append(stage.index)
        return {name: found[name] for name in sorted(found) if len(found[name]) > 1}

    def _others(self, stage: StageTape) -> list[str]:
        """Return the parameters and buffers that are read on this stage, also inside of functions
        (reentrant checkpoints), and those that live here and that no call reads."""
        held = (*self.recording.parameters, *self.recording.buffers)
        found = [h.name for h in held if stage.index in h.hops]
        if stage.stage not in (before.stage for before in self.stages[: stage.index]):
            found += [h.name for h in held if h.hop is None and h.stage == stage.stage]
        return found


@contextmanager
def _other_remedies() -> Iterator[None]:
    """Around a recording: its errors may name schedules that only a Pipeline has."""
    try:
        yield
    except BlockpipeError as error:
        if "schedule='uncut'" in str(error) or "schedule='sequential'" in str(error):
            error.add_note(
                "blockpipe: stages in processes have no schedule='uncut' or 'sequential'; a "
                "Pipeline, in one process, has them"
            )
        raise


@remembers_caller
def build_stage(
    model: nn.Module,
    stage: int,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: StagePlan | None = None,
    device: Any = None,
    weights: Weights | None = None,
    init: Init | None = None,
) -> StageModule:
    """Build one stage of a marked model as a module for ``torch.distributed.pipelining``.

    Its forward takes the tensors that cross from the stage before and returns those that cross to
    the next. The stages between pass on skip connections, inputs and integers. The module has the
    parameters of its own stage, under the names that they have in the model.

    Args:
        model: the model, marked and otherwise unmodified. If ``weights`` or ``init`` is given, it
            is on the meta device, and the tensors of other stages stay there.
        stage: the stage's place in the chain of stages; ``-1`` is the last one.
        args: the positional arguments of a forward, of one micro-batch. The stage works for these
            shapes, in the model's present mode (train or eval), with gradients as they are now (on
            or off).
        kwargs: its keyword arguments.
        plan: stages that override the marks.
        device: the stage's device; ``None`` is the CPU.
        weights: as for :func:`blockpipe.materialize`.
        init: as for :func:`blockpipe.materialize`.

    Returns:
        The stage. Modules that are on one stage as a whole are the model's own. The code between
        them is replayed from a recording.

    Raises:
        RecordingError: the code between modules cannot be replayed: it branches on a tensor's
            value, draws Python's random numbers, or has sizes that depend on data.
        PlanError, StateError, CrossingError: the stages cannot be in different processes.

    Source: ``torch.distributed.pipelining.Pipe.build_stage``.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.distributed import build_stage
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> net = bp.begin_blocks(net, {"1": 1})
        >>> first, last = (build_stage(net, at, torch.ones(3, 4)) for at in (0, 1))
        >>> [name for name, _ in last.named_parameters()]
        ['1.weight', '1.bias']
        >>> last(*first(torch.ones(3, 4)))[0].shape
        torch.Size([3, 2])
    """
    if isinstance(args, Tensor) or not isinstance(args, tuple | list):
        args = (args,)
    place = torch.device("cpu") if device is None else torch.device(device)
    found = CutForward(model, tuple(args), kwargs or {}, plan, place)
    count = len(found.stages)
    if not -count <= stage < count:
        raise PlanError(
            f"expected a stage from 0 to {count - 1}, got {stage} ({users_line()}); the forward "
            f"of {type(model).__name__} has {count} stages"
        )
    fill_own(model, found.recording, [found.stages[stage].stage], place, weights, init)
    found.place(stage % count)
    return found.module(stage)


def fill_own(
    model: nn.Module,
    recording: Recording,
    stages: Iterable[int],
    device: torch.device,
    weights: Weights | None,
    init: Init | None,
) -> None:
    """Give the tensors of some stages their values from ``weights`` and ``init``, if given."""
    if weights is not None or init is not None:
        devices = [device] * recording.num_stages
        materialize(model, recording, devices, weights=weights, init=init, stages=[*stages])


@leaves_intact
@as_ours
@counting_writes()
def _taped(request: RecordRequest, recording: Recording) -> Tape:
    """Tape a forward under the same settings as its recording."""
    model, place = request.model, torch.device("cpu")

    def watch(given: RecordRequest, holders: list[Holder], *, fake: bool) -> Tape:
        return taped(given, recording, place, fake=fake)

    def on_fakes() -> Tape:
        slots = (parameters_of, buffers_of)
        homes = {name: place for each in slots for name, _ in named_slots(model, each)}
        return run_on_fakes(request, partial(watch, fake=True), homes)

    with closed_to_others(model), request.signals, request.undone:
        if recording.fake:
            try:
                return on_fakes()
            except BlockpipeError:
                raise
            except Exception as error:  # it asks a buffer for a number, which a fake one has not
                if is_on_meta(model):
                    raise _no_tape(error) from error
        own = {t.device for t in (*model.parameters(), *model.buffers())}
        place = own.pop() if len(own) == 1 else place
        try:
            return run_for_real(request, partial(watch, fake=False))
        except BlockpipeError:
            raise
        except Exception as error:  # it has just been recorded, so this is of the tape
            raise _no_tape(error) from error


def _no_tape(error: Exception) -> RecordingError:
    return RecordingError(
        f"expected code between modules that a tape can hold, got {type(error).__name__}: {error} "
        f"({users_line()}); {REMEDY}"
    )


def _check(recording: Recording) -> None:
    """Refuse state that stages share and a forward changes, because each process has a copy."""
    recording.check()
    idle = gaps(hop.stage for hop in recording.hops if hop.operations or hop.kernels)
    if idle:  # a process would have nothing to do
        raise PlanError("; ".join([*idle, *recording.unreached]))
    problems = [
        f"{held.name!r} is written by the forward and read on stages "
        f"{sorted({held.stage, *held.also_read_on, *(recording.route[hop] for hop in held.hops)})} "
        f"({held.where})"
        for held in recording.shared_state
    ]
    problems += [
        f"{change.what} is changed by the forward, and {change.seen} on hops {change.hops} "
        f"({change.where})"
        for change in recording.shared_changes
    ]
    problems += [
        f"{left.what} keeps a tensor, and the loss {left.seen} on the last one ({left.where}); "
        f"{left.remedy}"
        for left in recording.left_for_loss
    ]
    problems += [
        f"a torch.Generator is drawn from on hops {drawn.hops} ({drawn.where})"
        for drawn in recording.shared_generators
    ]
    for late in recording.late_backwards:
        if late.compared is None:
            raise StateError(
                f"{late.what}, and the backward of an earlier micro-batch {late.needs}, which may "
                f"come later than that; {late.remedy}"
            )
    if problems:
        raise StateError(
            f"expected stages that share no state, got: {'; '.join(problems)}; each stage is in a "
            "process of its own, so read and write it on one stage"
        )


def _check_glue(recording: Recording) -> None:
    """Refuse code between modules that sets what outlives a forward."""
    if recording.set_between:
        sets = "; ".join(f"{what} ({where})" for what, where in recording.set_between)
        raise RecordingError(
            "expected code between modules that sets nothing but its own variables, for a stage "
            f"replays it without Python, got one that sets {sets}; if only the first forward does "
            f"so, call the model once before, or {REMEDY}"
        )
    if recording.read_between:
        reads = "; ".join(f"{what} ({where})" for what, where in recording.read_between)
        raise RecordingError(
            "expected code between modules that reads the same values in each forward, for a stage "
            f"has them as constants, got one that reads what a module changes: {reads}; return it "
            f"in a tensor, or {REMEDY}"
        )
