"""From a marked model and a sample to the modules of its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import remembers_caller, users_line
from .._common.model_turns import alone_with
from .._common.modules import named_slots
from .._common.thread_state import as_ours
from .._torch.modules import buffers_of, parameters_of
from ..errors import PlanError, RecordingError, StateError
from ..preparation.sealed_forwards import recompute_spec
from ..recording.fake_run import run_on_fakes
from ..recording.plan_resolution import planned_by
from ..recording.record import record_planned, run_for_real
from ..recording.recording import Recording
from ..recording.sample import RecordRequest
from ..recording.watching.watched_run import counting_writes
from ..restoring.holders import Holder
from ..restoring.restored_thread import leaves_intact
from ..stages.plan import StagePlan
from ..weights.materialize import Init, materialize
from ..weights.sources import Weights
from .cutting import StageTape, cut
from .microbatches.streams import drawn_sources
from .replay import StageModule
from .taping.tape import Tape
from .taping.taping import taped


class CutForward:
    """A forward of a model, recorded, taped and cut: the same data in every process.

    Args:
        model: the user's; marked, unless there is a plan.
        args: the forward's positional arguments, of one micro-batch.
        kwargs: its keyword arguments.
        plan: stages that override the marks.
        device: the one that this process's stages are on.

    Attributes:
        recording: what is on which stage.
        tape: what the glue does.
        stages: the pieces of the tape, one for each hop of the route.
        sources: the generators that it draws random numbers from.

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
        planned = planned_by(model, plan)
        intended = None if self.device.type == "cpu" else [self.device]
        request = RecordRequest(model, args, kwargs, planned)
        self.recording = record_planned(request, intended=intended)
        _check(self.recording)
        self.tape = _taped(request, self.recording)
        self.stages = cut(self.tape)
        held = (*self.recording.parameters, *self.recording.buffers)
        kinds = {kind for hop in self.recording.hops for kind in hop.draws}
        self.sources = drawn_sources(kinds, self.device)
        self._names = {h.name: h.names for h in held}

    def module(self, index: int) -> StageModule:
        """Make the module of one stage; it is on the device that its parameters are on."""
        stage = self.stages[index]
        unread = self._unread(stage)
        module = StageModule(self.model, self.tape, stage, self._names, unread, self.device)
        modules = dict(self.model.named_modules())
        for path in stage.modules:
            spec = recompute_spec(f"module {path!r}", path, self.recording, modules)
            if spec is not None:
                module.recomputable[path] = spec
        return module

    def place(self, index: int) -> None:
        """Move the tensors of one stage to its device, in the model: all that is built of it later
        shares them. Those without values stay as they are."""
        found = self.module(index)
        for _, weight in found.named_parameters():
            if weight.device != self.device and not weight.is_meta:
                weight.data = weight.data.to(self.device)
        for name, buffer in found.named_buffers(remove_duplicate=False):
            if buffer.device != self.device and not buffer.is_meta:
                path, _, key = name.rpartition(".")
                buffers_of(self.model.get_submodule(path))[key] = buffer.to(self.device)

    def parameters_of(self, index: int) -> set[str]:
        """The first names of the parameters that a stage has."""
        stage = self.stages[index]
        first = {id(t): name for name, t in reversed([*named_slots(self.model, parameters_of)])}
        found = {name for name in (*stage.held, *self._unread(stage)) if name in first.values()}
        for path in stage.modules:
            for tensor in self.model.get_submodule(path).parameters():
                found.add(first[id(tensor)])
        return found

    def tied(self) -> dict[str, list[int]]:
        """The stages that have a parameter, by first name, of those that several have."""
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in self.parameters_of(stage.index):
                found.setdefault(name, []).append(stage.index)
        return {name: found[name] for name in sorted(found) if len(found[name]) > 1}

    def _unread(self, stage: StageTape) -> list[str]:
        """Parameters and buffers that no call reads, and that live on this stage."""
        if stage.stage in (before.stage for before in self.stages[: stage.index]):
            return []
        held = (*self.recording.parameters, *self.recording.buffers)
        return [h.name for h in held if h.hop is None and h.stage == stage.stage]


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
    the next: skip connections, inputs and integers are handed on through the stages between. It
    has the parameters of its own stage, under the names that they have in the model.

    Args:
        model: marked, and otherwise unmodified; on the meta device if ``weights`` or ``init`` is
            given: then the tensors of other stages stay there.
        stage: its place in the chain of stages; ``-1`` is the last one.
        args: the positional arguments of a forward, of one micro-batch. The stage is for these
            shapes, for the model's mode (train or eval), and for gradients being on or off.
        kwargs: its keyword arguments.
        plan: stages that override the marks.
        device: the stage's; ``None``: the CPU.
        weights: as for :func:`blockpipe.materialize`.
        init: as for :func:`blockpipe.materialize`.

    Returns:
        The stage. Modules that lie on one stage as a whole are the model's own; the code between
        them is replayed from a recording.

    Raises:
        RecordingError: the code between modules does what cannot be replayed: it branches on a
            tensor's value, draws random numbers of Python's, or has sizes that depend on data.
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
    """Give the tensors of some stages values, where they are asked for."""
    if weights is not None or init is not None:
        devices = [device] * recording.num_stages
        materialize(model, recording, devices, weights=weights, init=init, stages=[*stages])


@leaves_intact
@as_ours
@counting_writes()
def _taped(request: RecordRequest, recording: Recording) -> Tape:
    """Tape a forward in the surroundings of its recording."""
    model, place = request.model, torch.device("cpu")

    def watch(given: RecordRequest, holders: Collection[Holder], *, fake: bool) -> Tape:
        return taped(given, recording, place, fake=fake)

    with alone_with(model):
        try:
            if recording.fake:
                slots = (parameters_of, buffers_of)
                homes = {name: place for each in slots for name, _ in named_slots(model, each)}
                return run_on_fakes(request, partial(watch, fake=True), homes)
            own = {t.device for t in (*model.parameters(), *model.buffers())}
            place = own.pop() if len(own) == 1 else place
            return run_for_real(request, partial(watch, fake=False))
        except NotImplementedError as error:
            raise RecordingError(
                f"expected a forward that runs again, got {type(error).__name__}: {error} "
                f"({users_line()})"
            ) from error


def _check(recording: Recording) -> None:
    """Refuse what stages share and a forward changes: each process has a copy of its own."""
    recording.check()
    problems = [
        f"{held.name!r} is written by the forward and read on stages "
        f"{sorted({held.stage, *held.also_read_on})} ({held.where})"
        for held in recording.shared_state
    ]
    problems += [
        f"{change.what} is changed by the forward, and {change.seen} on hops {change.hops} "
        f"({change.where})"
        for change in recording.shared_changes
    ]
    if problems:
        raise StateError(
            f"expected stages that share no state, got: {'; '.join(problems)}; each stage is in a "
            "process of its own, so read and write it on one stage"
        )
