"""Random numbers that do not depend on how many processes there are.

Each micro-batch has a stream of its own, as in one process (``devices/rng_streams.py``), and a
stage goes on where the one before has stopped: the state of the generator is handed on with the
tensors of the micro-batch. A seed for each stage was no alternative: dropout would be another one
with other cuts.

An accelerator's generator is its own in one process too, so that nothing is handed on there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ...devices.devices import is_asynchronous
from ...devices.rng_streams import (
    Source,
    States,
    current,
    derived,
    is_same_state,
    own_turn,
    restore,
    sources_of,
)
from ..replicas import StageReplicas
from ..stage_places import StagePlaces
from .generator_states import packed, unpacked


def drawn_sources(kinds: Collection[str], device: torch.device) -> list[Source]:
    """Return the generators that a forward draws from; the same in every process."""
    return sources_of(sorted(kinds), device)


def handed_on(sources: Sequence[Source], device: torch.device) -> list[Source]:
    """Return those generators whose states go from stage to stage."""
    return [] if is_asynchronous(device) else [*sources]


def of_replica(states: States, number: int) -> States:
    """Return the states with which a replica begins a step.

    Args:
        states: of the first replica.
        number: of the replica.
    """
    if number == 0:
        return states
    return {source: derived(source, state, f"copy {number}") for source, state in states.items()}


class StepStreams:
    """The streams of one step's micro-batches in one process.

    Args:
        sources: the generators that the step draws from; may be none.
        device: of this process's stages.
        places: where stages are.
        replicas: the processes that have the same stages; ``None``: there are none.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        device: torch.device,
        places: StagePlaces,
        replicas: StageReplicas | None,
    ) -> None:
        self._sources = sources
        self._handed = handed_on(sources, device)
        self._device = device
        self._places = places
        self._replicas = replicas
        self._begin: States = {}
        self._states: dict[int, States] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Stand around a step: all processes begin where that of the first stage is, and go on from
        the first micro-batch's last number. Where it fails, it counts as if nothing was drawn."""
        if not self._sources:
            yield
            return
        before = current(self._sources)
        self._begin = {**before, **self._shared(before, 0)}
        if self._replicas is not None:
            self._begin = of_replica(self._begin, self._replicas.number)
        if not self._handed and not self._places.is_own(0):  # the host's would be the same ones
            own = self._derived(f"stage {self._places.own[0]}")
            self._begin.update({s: own[s] for s in own if s in ("random", "numpy", _CPU)})
        try:
            yield
            restore(self._after())
        except BaseException:
            restore(before)
            raise

    def drawing(self, microbatch: int, handed: Tensor | None) -> AbstractContextManager[None]:
        """While entered, numbers are those of a micro-batch.

        Args:
            microbatch: whose.
            handed: the state that the stage before has left, as a tensor.
        """
        return self._drawing(microbatch, handed) if self._sources else nullcontext()

    @contextmanager
    def _drawing(self, microbatch: int, handed: Tensor | None) -> Iterator[None]:
        states = self._states.get(microbatch)
        if states is None:
            states = self._start(microbatch)
        if handed is not None:
            states = {**states, **unpacked(handed, self._handed)}
        with own_turn():
            restore(states)
            yield
            self._states[microbatch] = current(self._sources)

    def state(self, microbatch: int) -> Tensor:
        """Return the state in which this process has left a micro-batch's numbers."""
        return packed(self._states[microbatch], self._handed, self._device)

    def _start(self, microbatch: int) -> States:
        return self._derived(f"micro-batch {microbatch}") if microbatch else self._begin

    def _derived(self, what: str) -> States:
        return {source: derived(source, state, what) for source, state in self._begin.items()}

    def _after(self) -> States:
        """The states that the generators have after a step, the same in every process."""
        after = {**self._states.get(0, self._begin)}
        for source, state in after.items():
            if is_same_state(state, self._begin[source]) and self._others_drew(source):
                # Only others have drawn: the next step must not draw the same numbers.
                after[source] = derived(source, state, "the next step")
        return {**after, **self._shared(after, -1)}

    def _others_drew(self, source: Source) -> bool:
        return any(
            not is_same_state(states[source], self._start(microbatch)[source])
            for microbatch, states in self._states.items()
            if microbatch
        )

    def _shared(self, states: States, stage: int) -> States:
        """The states that the process of a stage has, of the first replica."""
        if not self._handed:
            return {}
        tensor = packed(states, self._handed, self._device)
        if self._replicas is not None:
            self._replicas.broadcast([tensor])
        self._places.broadcast(tensor, stage)
        return unpacked(tensor, self._handed)


_CPU = torch.device("cpu")
