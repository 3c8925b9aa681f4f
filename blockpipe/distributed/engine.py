"""Use torch's engine: its schedules by name, the ranks of their stages, its class for a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from .._common.callsite import users_line
from .._common.checks import did_you_mean
from ..batches.microbatch import Microbatch
from ..devices.rng_streams import preserve_rng, torchs_of
from ..errors import PlanError, RouteError, ScheduleError, UsageError
from .build import CutForward
from .microbatches.calls import StageCalls
from .microbatches.engine_stage import StageObserver
from .microbatches.generator_states import size_of_states
from .microbatches.hooked_steps import hooked_steps
from .microbatches.out_of_reach import OutOfReach
from .microbatches.streams import handed_on
from .rank_failures.progress import ProcessProgress
from .rank_failures.watched_stage import WatchedStage
from .replay import StageModule
from .taping.tape import Meta

# The words of Pipeline where it has one for the same thing.
SCHEDULES: dict[str, type[Any]] = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "looped-bfs": torchs.ScheduleLoopedBFS,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zb-h1": torchs.ScheduleInterleavedZeroBubble,
    "zb-v": torchs.ScheduleZBVZeroBubble,
    "dualpipe-v": torchs.ScheduleDualPipeV,
}
_TORCHS_NAMES = {
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
_SINGLE = {"gpipe", "1f1b"}
_V = {"zb-v", "dualpipe-v"}
_REVERSED = {"looped-bfs"}  # backwards of later micro-batches come first
_SPLITS = {"zb-h1", "zb-v", "dualpipe-v"}  # the backward, in that of inputs and that of weights

FOR_ANY_NUMBER = {
    "1f1b": "gpipe",
    "interleaved": "looped-bfs",
    "zb-h1": "looped-bfs",
    "dualpipe-v": "zb-v",
}
"""For each schedule that refuses some numbers of micro-batches, a schedule with the same ranks of
stages that takes any number."""


def schedule_name(name: object) -> str:
    """Return the name of one of torch's schedules, in Blockpipe's words.

    Raises:
        ScheduleError: there is no schedule of this name.
    """
    key = str(name).lower()
    found = _TORCHS_NAMES.get(key.removeprefix("schedule"), key.removeprefix("schedule"))
    if found not in SCHEDULES:
        hint = did_you_mean(key, [*SCHEDULES], f"there are {', '.join(SCHEDULES)}")
        raise ScheduleError(
            f"expected one of torch's schedules, got {name!r} ({users_line()}); {hint}"
        )
    return found


def splits_backward(name: str) -> bool:
    """Whether a schedule runs the backward of a stage in two parts."""
    return name in _SPLITS


def places(name: str, route: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each stage in the chain.

    Args:
        name: the schedule's name.
        route: the stage's number in the marks, hop by hop.
        ranks: the number of processes.

    Raises:
        ScheduleError: the schedule does not take so many stages.
        PlanError: the forward returns to a stage that would be on another rank then.
    """
    count = len(route)
    rest = count % ranks
    needed = "as many stages as processes"
    fits = count == ranks
    if name in _V:
        needed, fits = "twice as many stages as processes", count == 2 * ranks
    elif name not in _SINGLE:
        needed, fits = "a multiple of the processes as stages", not rest
    if not fits:
        others = "gpipe or 1f1b" if count == ranks else "interleaved" if not rest else ""
        fix = f"use schedule={others!r}, or " if others and name not in others else ""
        raise ScheduleError(
            f"expected {needed} for schedule {name!r}, got {count} stages on {ranks} processes "
            f"({users_line()}); {fix}mark other stages, or start other processes"
        )
    found = [k % ranks for k in range(count)]
    if name in _V:
        found = [*range(ranks), *reversed(range(ranks))]
    if len(set(route)) < count and found != list(route):
        back = next(k for k in range(count) if route[k] != found[k])
        raise PlanError(
            f"expected a forward that goes from process to process as schedule {name!r} does, "
            f"{found}, got the route {list(route)}, which is on stage {route[back]} at its step "
            f"{back} ({users_line()}); mark the later part as a stage of its own"
        )
    return found


def takes(name: str, microbatches: int, places: Sequence[int]) -> bool:
    """Return whether a schedule takes so many micro-batches.

    Args:
        name: the schedule's name.
        microbatches: the number of micro-batches.
        places: the rank of each stage.
    """
    if name in ("1f1b", "dualpipe-v"):
        return microbatches >= len(places)
    if name in ("interleaved", "zb-h1"):
        return not microbatches % max(1, microbatches // len(set(places)))
    return True


def make_stage(
    module: StageModule,
    count: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    splits: bool,
    progress: ProcessProgress | None = None,
) -> WatchedStage:
    """Make a stage of torch's engine, with the shapes and dtypes of its tensors.

    Args:
        module: the stage.
        count: the number of stages.
        device: the stage's device.
        group: the processes; ``None`` takes all of them.
        splits: whether the schedule splits the backward.
        progress: where the stage notes what it does.

    Example:
        >>> import torch, blockpipe as bp
        >>> import torch.distributed as dist
        >>> from blockpipe.distributed import build_stage, make_stage
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> module = build_stage(net, 0, torch.ones(2, 4))
        >>> stage = make_stage(module, 1, torch.device("cpu"), None, splits=False)
        >>> stage.stage_index, stage.is_last
        (0, True)
        >>> dist.destroy_process_group()
    """
    # The engine looks for weights on the paths from outputs to inputs. If no input needs a
    # gradient there are no such paths, so the backward runs as a whole.
    needs_grad = any(meta.requires_grad for meta in module.input_metas)
    whole = splits and module.index > 0 and not needs_grad
    module.leads_to_inputs = splits
    made = WatchedStage(
        module,
        module.index,
        count,
        device,
        input_args=tuple(meta.example() for meta in module.input_metas),
        output_args=tuple(meta.example() for meta in module.output_metas),
        group=group,
        dw_builder=_whole if whole else None,
    )
    made.progress = progress or ProcessProgress()
    return made


def _whole() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """Stand for the weights' part of a backward that has run as a whole."""


def build_schedule(
    name: str,
    stages: Sequence[PipelineStage],
    microbatches: int,
    loss_fn: Callable[[tuple[Tensor, ...], Any], Tensor],
) -> Any:
    """Make one of torch's schedules from this process's stages.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"looped-bfs"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-v"``
            or ``"dualpipe-v"``, or torch's own name of it.
        stages: this process's stages, in order, from :func:`make_stage`.
        microbatches: the number of micro-batches.
        loss_fn: ``(tensors, target) -> loss``, for the tuple of tensors that the last stage
            returns. Gradients are not divided by the number of micro-batches, so their weights
            belong in the loss.

    Raises:
        ScheduleError: the schedule does not take so many micro-batches.

    Example:
        >>> import torch, blockpipe as bp
        >>> import torch.distributed as dist
        >>> from blockpipe.distributed import build_schedule, build_stage, make_stage
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> module = build_stage(net, 0, torch.ones(2, 4))
        >>> stage = make_stage(module, 1, torch.device("cpu"), None, splits=False)
        >>> loss_fn = lambda outputs, target: torch.nn.functional.mse_loss(outputs[0], target)
        >>> schedule = build_schedule("gpipe", [stage], 4, loss_fn)
        >>> out = schedule.step(torch.ones(8, 4), target=torch.zeros(8, 2))
        >>> out[0].shape, net[0].weight.grad.shape
        (torch.Size([8, 2]), torch.Size([4, 4]))
        >>> dist.destroy_process_group()
    """
    key = schedule_name(name)
    where = [stages[0].stage_index_to_group_rank[k] for k in range(stages[0].num_stages)]
    if not takes(key, microbatches, where):
        needed = f"at least as many micro-batches as stages, {len(where)},"
        if key in ("interleaved", "zb-h1"):
            needed = f"a multiple of {len(set(where))} micro-batches, or fewer than twice that,"
        raise ScheduleError(
            f"expected {needed} for schedule {name!r}, got {microbatches} ({users_line()}); pass "
            f"other chunks, or use {FOR_ANY_NUMBER[key]!r}"
        )
    given = stages[0] if key in _SINGLE else list(stages)
    return SCHEDULES[key](given, microbatches, loss_fn=loss_fn, scale_grads=False)


class Engine:
    """The stages of this process for micro-batches of one kind, under torch's schedule.

    Args:
        cut: the forward of such a micro-batch.
        name: the schedule's name.
        microbatches: the number of micro-batches.
        group: the processes; ``None`` takes all of them.
        loss_fn: as for :func:`build_schedule`.
        progress: where the stages note what they do.
        homes: this process's stages of the sample's forward, whose values it has.

    Attributes:
        number: the same in all processes, for engines that have run together; 0 before that.
    """

    def __init__(
        self,
        cut: CutForward,
        name: str,
        microbatches: int,
        group: dist.ProcessGroup | None,
        loss_fn: Callable[[tuple[Tensor, ...], Any], Tensor],
        progress: ProcessProgress,
        homes: Iterable[nn.Module],
    ) -> None:
        self.number = 0
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        where = places(name, cut.tape.route, ranks)
        own = [k for k, place in enumerate(where) if place == rank]
        count, device = len(where), cut.device
        self._device = device
        self.modules = {k: cut.module(k) for k in own}
        self._elsewhere = OutOfReach(cut.model, [*self.modules.values(), *homes])
        self.sources = cut.sources
        for module in self.modules.values():
            module.sources = cut.sources
            if handed := handed_on(cut.sources, device):
                module.hand_on(Meta((size_of_states(handed),), torch.uint8, requires_grad=False))
        self.last = self.modules.get(count - 1) or cut.module(count - 1)
        self.first = self.modules.get(0)
        self.has_last = count - 1 in self.modules
        self.is_alone = ranks == 1
        self.answers, self.digest = cut.answers(), cut.digest
        self._questions = None if self.first is None else cut.questions()
        splits = splits_backward(name)
        self._in_order = not splits and (name not in _REVERSED or microbatches == 1)

        def build() -> tuple[list[WatchedStage], Any]:
            stages = [
                make_stage(m, count, device, group, splits=splits, progress=progress)
                for m in self.modules.values()
            ]
            return stages, build_schedule(name, stages, microbatches, loss_fn)

        self._build = build
        self._stages, self._schedule = build()
        if "arg_mbs" not in inspect.signature(self._schedule.step).parameters:
            raise UsageError(
                f"expected a torch whose schedules take micro-batches, got {torch.__version__}; "
                "install a newer one (2.15 has been tried)"
            )

    def begin_anew(self, number: int) -> None:
        """Forget what torch's engine keeps from earlier steps, if it has run: its connections.

        Args:
            number: of this engine from now on.
        """
        if self.number:
            self._stages, self._schedule = self._build()
        self.number = number

    @torch.no_grad()
    def ask(self, part: Sequence[Microbatch]) -> None:
        """Ask in the first stage's process what the forward asks about its arguments.

        Raises:
            RouteError: a micro-batch has another answer than the recorded one.
        """
        if self._questions is None:
            return
        for number, microbatch in enumerate(part):
            given = self._questions.arguments(*microbatch.args, **microbatch.kwargs)
            try:
                with preserve_rng(torchs_of(self._device)):  # it is no part of the step
                    self._questions.run(tuple(tensor.to(self._device) for tensor in given))
            except RouteError as error:
                error.add_note(f"blockpipe: in micro-batch {number} of {len(part)} of one size")
                raise

    def check_hooks(self) -> None:
        """Look for hooks on parameters, before a step with backwards.

        Raises:
            UsageError: they would not be called as in a plain loop.
        """
        for stage in self._stages:
            stage.steps = hooked_steps(stage.submod, in_order=self._in_order)

    def run(
        self,
        calls: StageCalls,
        inputs: list[tuple[Tensor, ...]] | None,
        targets: list[Any],
        first: int,
        observer: StageObserver | None,
        *,
        backward: bool,
    ) -> None:
        """Run a step, or its forwards alone.

        Args:
            calls: how stages are called.
            inputs: by micro-batch, what the first stage takes; ``None``: it is elsewhere.
            targets: by micro-batch, what the loss is given.
            first: the number of the first micro-batch.
            observer: hears of each action.
            backward: whether gradients are asked for.
        """
        for module in self.modules.values():
            module.microbatch, module.calls = first, calls
        for stage in self._stages:
            stage.first, stage.observer, stage.sums = first, observer, calls.sums
        given = {"arg_mbs": inputs, "target_mbs": targets if self.has_last else None}
        run = self._schedule.step if backward else self._schedule.eval
        with self._elsewhere.during():
            run(**given, return_outputs=False)
