"""The random numbers of one step: a stream for each micro-batch, and notes of who draws."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from .._common.callsite import users_line, warn
from .._common.threads.others import are_others
from .._common.threads.thread_state import ours
from ..batches.losses import computed_loss
from ..devices.rng_streams import (
    RngStreams,
    SettingGenerators,
    Source,
    current,
    moved,
    sources_of,
)
from ..schedules.schedule import Schedule
from .microbatch.backward_writes import ParameterWrites
from .step_request import StepRequest


class StepRandomness:
    """The streams that one step's micro-batches draw from.

    A recording says which hops draw. In the first step each hop has all generators that it could
    draw from, for its forward may have gone another way when it was recorded. Draws that the
    recording did not see are noted for later steps.

    Args:
        request: what the step is asked to do.
    """

    def __init__(self, request: StepRequest) -> None:
        self._prepared = request.prepared
        self._loss_fn, self._loss_kind = request.loss_fn, request.loss_kind
        self._option = request.schedule
        self._count = len(request.microbatches)
        self._is_one_by_one = self._prepared.runs_inline(request.schedule, self._count)
        self._is_first = self._prepared.steps == 0
        self.sources = self._sources()
        self._streams: RngStreams | None = None

    def _sources(self) -> list[list[Source]]:
        prepared = self._prepared
        if self._is_first:
            return prepared.all_sources
        sources = prepared.sources
        if self._is_one_by_one and any(sources):
            # Nobody has to wait for his turn: each hop may draw for the first time.
            every = list(dict.fromkeys(source for hop in sources for source in hop))
            sources = [every] * len(sources)
        if not prepared.loss_draws.get(self._loss_kind, self._loss_fn is not None):
            return sources
        of_loss = sources_of(["torch"], prepared.devices[prepared.route[-1]])
        return [*sources[:-1], list(dict.fromkeys([*sources[-1], *of_loss]))]

    @cached_property
    def all_sources(self) -> list[Source]:
        """The generators that any hop draws from."""
        return list(dict.fromkeys(source for hop in self.sources for source in hop))

    @cached_property
    def any_draws(self) -> bool:
        """Whether anything in the step draws numbers."""
        return any(self.sources)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Stand around the forwards: where they succeed, the generators go on from them."""
        with SettingGenerators(sets=self.any_draws) as stretch:
            # Not before: another pipeline's step may end in between.
            if self.any_draws:
                self._streams = RngStreams(self.all_sources, self._count)
            streams = self._streams
            before = {} if streams is not None else current(self._prepared.generators)
            try:
                yield
            except BaseException:
                if streams is not None:
                    streams.abandon()
                raise
            if streams is not None:
                streams.finish()
            others = streams.others if streams is not None else {*moved(before)}
            is_alone = stretch.is_alone()
        if is_alone:  # else another pipeline has set them
            self._tell(others)

    def _tell(self, others: set[Source]) -> None:
        """Tell that something has drawn from generators for which it had no stream."""
        # From now on each hop may. In a first step no hop is without one.
        drawn = set[Source]() if self._is_first else others
        kinds = {source if isinstance(source, str) else "torch" for source in drawn}
        is_new = [self._prepared.mark_as_random(kind=kind) for kind in sorted(kinds)]
        if not others or self._is_one_by_one:
            return  # one by one a backward may draw, too
        if self._streams is None and (are_others() or not any(is_new)):
            return  # it was another thread, perhaps, and has done no harm
        if not any(is_new):
            warn(
                "while a step ran, something else than its forwards has drawn random numbers from "
                "a generator of the process: another thread, or code in a backward. A step sets "
                "these generators, and sets them back at its end, so that a thread would draw the "
                "same numbers again, and this one's depended on timing; give the thread a "
                "generator of its own (torch.Generator, random.Random, numpy.random.default_rng; "
                f"{users_line()})"
            )
        else:
            warn(
                "a stage that had not drawn random numbers before has drawn some (a dropout that "
                "begins now, or in a branch that the data choose?), or a hook in a backward or "
                "another thread; where it was not alone, the numbers of this step depended on "
                "timing; from the next step on all forwards take turns, and draw the same numbers "
                f"in each run ({users_line()})"
            )

    def enter(self, m: int, sources: list[Source]) -> None:
        """A micro-batch begins to draw from its stream; waits for others that draw."""
        if self._streams is not None:
            self._streams.enter(m, sources)

    def enter_hop(self, m: int, hop: int) -> None:
        """A micro-batch's forward comes to a hop."""
        if self._streams is not None:
            self._streams.enter(m, self.sources[min(hop, len(self.sources) - 1)])

    def leave(self, m: int, hop: int) -> None:
        """A micro-batch leaves a hop, or is done; does nothing where it does not draw."""
        if self._streams is None:
            return
        drew = self._streams.leave(m, tell=self._is_first)
        if not self._is_first:
            return
        kinds = {source if isinstance(source, str) else "torch" for source in drew}
        if hop == len(self._prepared.route) - 1 and self._prepared.loss_draws.get(self._loss_kind):
            kinds.discard("torch")  # it was the loss
        hops = self._prepared.recording.hops
        hop = min(hop, len(hops) - 1)  # without cuts a forward may go further
        for kind in kinds - hops[hop].draws:
            self._prepared.mark_as_random(hop, kind)

    def _schedule(self) -> Schedule | None:
        return None if self._is_one_by_one else self._prepared.schedule(self._option, self._count)

    def loss(self, output: Any, target: Any) -> Any:
        """Compute what the user's code gives for a loss, and note once whether that draws."""
        loss_fn: Callable[..., Any] | None = self._loss_fn
        if loss_fn is None or self._loss_kind in self._prepared.loss_draws:
            return computed_loss(output, target, loss_fn)
        drew: list[object] = []
        with ours():  # what this reads is not the loss's
            writes = ParameterWrites(self._prepared, self._schedule())
        with writes.checked("the loss", len(self._prepared.route) - 1) as meter:
            meter.drew = drew.append
            loss = computed_loss(output, target, loss_fn)
        self._prepared.loss_draws[self._loss_kind] = bool(drew)
        return loss
