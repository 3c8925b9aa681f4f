"""What the engine tells whoever observes a step.

The engine knows this interface and no observer: a step that nobody observes pays for a comparison
with ``None`` here and there, and for nothing else. torch's profiler could be asked instead, but it
knows neither hops nor micro-batches, and slows small operations down.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..schedules.schedule import Kind, Schedule

Moment = Literal["sends", "arrives", "waits", "goes on"]

Watch = Callable[[Moment, torch.Stream | None], None]
"""Called at the moments of one copy, with the stream that comes to the moment (``None``: the
host): ``"sends"`` and ``"arrives"`` around the copy, ``"waits"`` and ``"goes on"`` around what its
reader stands still for it."""


class Observer(Protocol):
    """Observes one step. Its methods are called in the threads that do the work, and never fail."""

    def plays(self, schedule: Schedule) -> None:
        """The step goes by this schedule, on lanes; not called where one thread does all."""

    def begins(self, kind: "Kind | Literal['wait']", hop: int, stage: int, microbatch: int) -> None:
        """An action begins, or a run's wait for its turn on a hop."""

    def ends(self, kind: "Kind | Literal['wait']", hop: int, microbatch: int) -> None:
        """It has succeeded. What fails, or is abandoned, does not end."""

    def watch(self, tensor: Tensor, from_hop: int, to_hop: int, microbatch: int) -> Watch:
        """A tensor is about to cross from a hop (-1: the caller) to another."""
