"""The interface by which the engine reports to the observer of a step.

The engine knows this interface and no observer: a step without one costs a few comparisons with
``None`` and nothing else. torch's profiler was no alternative: it knows neither hops nor
micro-batches, and slows small operations down.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..schedules.schedule import Kind, Schedule

Moment = Literal["sends", "arrives", "waits", "goes on"]

Watch = Callable[[Moment, torch.Stream | None], None]
"""Called at the moments of one copy, with the stream that reaches the moment (``None``: the
host): ``"sends"`` and ``"arrives"`` around the copy, ``"waits"`` and ``"goes on"`` around the time
for which its reader waits for it."""


class Observer(Protocol):
    """An observer of one step. Its methods are called in the threads that do the work, and never
    fail."""

    def plays(self, schedule: Schedule) -> None:
        """The step follows this schedule, on lanes; not called if one thread runs all of it."""

    def begins(self, kind: "Kind | Literal['wait']", hop: int, stage: int, microbatch: int) -> None:
        """An action begins, or a run's wait for its turn on a hop."""

    def ends(self, kind: "Kind | Literal['wait']", hop: int, microbatch: int) -> None:
        """An action, or a wait, has succeeded; one that fails or is abandoned does not end."""

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch:
        """Return the watch of a copy that is about to cross from a hop (-1: the caller)."""


class Observers:
    """Several observers of one step, told of everything in turn.

    Args:
        observers: the observers.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def plays(self, schedule: Schedule) -> None:
        """The step follows this schedule."""
        for observer in self._observers:
            observer.plays(schedule)

    def begins(self, kind: "Kind | Literal['wait']", hop: int, stage: int, microbatch: int) -> None:
        """An action begins."""
        for observer in self._observers:
            observer.begins(kind, hop, stage, microbatch)

    def ends(self, kind: "Kind | Literal['wait']", hop: int, microbatch: int) -> None:
        """An action has succeeded."""
        for observer in self._observers:
            observer.ends(kind, hop, microbatch)

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch:
        """Return the watches of a copy as one."""
        watches = [o.watch(tensor, from_hop, to_hop, microbatch) for o in self._observers]

        def watch(moment: Moment, stream: torch.Stream | None) -> None:
            for each in watches:
                each(moment, stream)

        return watch
