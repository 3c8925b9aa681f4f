"""Make the engines of a pipeline, one for each kind of micro-batches, when they are first
needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.threads.thread_state import autocast_states
from ..batches.microbatch import Microbatch
from ..errors import RankError, UsageError
from ..preparation.shared_state import CodeKinds
from ..stages.plan import StagePlan
from .build import CutForward
from .engine import FOR_ANY_NUMBER, Engine, places, takes
from .kinds import arguments_in_words, contents_of_arguments, modes_in_words
from .rank_failures.progress import ProcessProgress
from .stage_places import StagePlaces
from .state.shared_memory import check_memory
from .taping.watched_model import WatchedModel

_KEPT = 8  # kinds of micro-batches


class Engines:
    """The engines of this process's stages, and the recorded forwards that they are made from.

    Args:
        model: the user's model.
        plan: stages that override the marks.
        device: the device of this process's stages.
        group: the processes; ``None`` takes all of them.
        loss_fn: as for :func:`build_schedule`.
        progress: where the stages note what they do.

    Attributes:
        first: the forward of the sample.
        places: the ranks of its stages.
        answers: what the forwards of the present step's micro-batches were recorded with.
        digests: of the code between modules, in the same order.
        modes: the modes of the model's modules in the present step, in words.
        watched: what the code between its modules may read.
    """

    first: CutForward
    places: StagePlaces

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan | None,
        device: torch.device,
        group: dist.ProcessGroup | None,
        loss_fn: Callable[[tuple[Tensor, ...], Any], Tensor],
        progress: ProcessProgress,
    ) -> None:
        self._model = model
        self._plan = plan
        self._device = device
        self._group = group
        self._loss_fn = loss_fn
        self._progress = progress
        self.answers: list[str] = []
        self.digests: list[str] = []
        self.modes: dict[str, str] = {}
        self.watched = WatchedModel(model)
        self._beside = CodeKinds()
        self._checked: set[Any] = set()  # kinds of losses, each with the kind of micro-batches
        self._cuts: dict[Any, CutForward] = {}
        self._engines: dict[Any, Engine] = {}
        self._asked: list[Engine] = []  # for the present step
        self._number = 0  # of engines; counted alike in all processes

    def start(self, sample: Microbatch, schedule: str) -> None:
        """Record the sample, and find where its stages are."""
        self.begin_step()
        self.first = self._cut(sample)
        ranks = places(schedule, self.first.tape.route, dist.get_world_size(self._group))
        self.places = StagePlaces(ranks, self._group)
        check_memory(self._model, self.first.recording, ranks)

    def begin_step(self) -> None:
        """Look at the model once for all micro-batches of a step."""
        self.answers, self.digests, self._asked = [], [], []
        self.modes = modes_in_words(self._model)
        self.watched.step_begins()

    def engine(
        self,
        part: list[Microbatch],
        schedule: str,
        chunks: int,
        loss_fn: Callable[..., Any] | None = None,
    ) -> Engine:
        """Return the engine for micro-batches of one kind; made once.

        Args:
            part: the micro-batches.
            schedule: the user's.
            chunks: how many micro-batches the user asked for.
            loss_fn: what the step calls with the output, if it is a function.

        Raises:
            StateError: the loss shares a value with a stage in another process.
            RouteError: in the first stage's process, if the micro-batches are none of this kind,
                because the forward asks something about them that has another answer.
        """
        name, ranks = schedule, self.places.ranks
        if not takes(name, len(part), ranks) and takes(name, chunks, ranks):
            name = FOR_ANY_NUMBER[name]  # the rest of a batch that does not divide
        key = self._key(part[0]), len(part), name
        if key not in self._engines:
            for old in [*self._engines][: max(0, len(self._engines) - _KEPT + 1)]:
                del self._engines[old]
            cut = self._cut(part[0])
            if cut.tape.route != self.first.tape.route:
                raise RankError(
                    f"expected the route of the sample, {self.first.tape.route}, got "
                    f"{cut.tape.route} ({users_line()}); make a pipeline for each"
                )
            check_memory(self._model, cut.recording, ranks)
            self._check_homes(cut)
            how = self._group, self._loss_fn, self._progress
            homes = [self.first.module(stage) for stage in self.places.own]
            self._engines[key] = Engine(cut, name, len(part), *how, homes)
        beside = key[0], *self._beside.known(loss_fn)
        if beside[1] is not None and beside not in self._checked:
            assert loss_fn is not None
            self._cut(part[0]).check_loss(part[0], loss_fn)
            self._checked.add(beside)
        engine = self._engines[key]
        engine.ask(part)
        self._asked.append(engine)
        self.answers.append(engine.answers)
        self.digests.append(engine.digest)
        return engine

    def numbers(self) -> str:
        """Return the numbers of the engines of a step, before :meth:`agreed`."""
        return " ".join(str(engine.number) for engine in self._asked)

    def agreed(self, *, alike: bool) -> None:
        """Have a step run on engines that all processes have made for one step.

        What one process has changed (a hook, a value that code between modules reads) can make a
        new engine there and nowhere else. An engine of torch's connects with its peers in its first
        step: the others would not answer.

        Args:
            alike: whether all processes have the same :meth:`numbers`.
        """
        for engine in self._asked:
            if not engine.number or not alike:
                self._number += 1
                engine.begin_anew(self._number)

    def _check_homes(self, cut: CutForward) -> None:
        """Refuse that a process reads what another one trains: it has the values of the start."""
        ranks, before, now = self.places.ranks, self.first.homes(), cut.homes()
        for name in cut.changing():
            homes = {ranks[stage] for stage in before.get(name, now[name])}
            others = sorted({ranks[stage] for stage in now[name]} - homes)
            if others:
                raise UsageError(
                    f"expected {name!r} to be read where it is trained, by the sample of the "
                    f"pipeline on rank {min(homes)}, got a forward that reads it on rank "
                    f"{others[0]} ({users_line()}); make a new pipeline for this forward"
                )

    def _cut(self, microbatch: Microbatch) -> CutForward:
        """The cut forward of a micro-batch's kind; recorded once."""
        key = self._key(microbatch)
        if key not in self._cuts:
            for old in [*self._cuts][: max(0, len(self._cuts) - _KEPT + 1)]:
                del self._cuts[old]
            self._cuts[key] = cut = CutForward(
                self._model, microbatch.args, microbatch.kwargs, self._plan, self._device
            )
            self.watched.recorded(cut.tape, cut.recording)
        return self._cuts[key]

    def _key(self, microbatch: Microbatch) -> Any:
        given = microbatch.args, microbatch.kwargs
        named = arguments_in_words(*given), *contents_of_arguments(*given).values()
        modes = (*self.modes.values(), torch.is_grad_enabled(), str(autocast_states()))
        return named, modes, self.watched.state
