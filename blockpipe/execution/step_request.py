"""What one step is asked to do: a value that all its parts read and none of them changes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.nn import Module

from .._common.threads.thread_state import CallerState
from ..batches.losses import kind_of
from ..batches.microbatch import Microbatch
from ..devices.observer import Observer
from ..preparation.prepared import Prepared
from ..schedules.builders import ScheduleOption, cuts_graphs
from .scaled_gradients import Scale


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """One step over some micro-batches.

    Args:
        prepared: the recording that fits the micro-batches, carried out.
        microbatches: in order.
        weights: the weight of each micro-batch's loss in the batch's.
        schedule: a name, ``"auto"``, ``"uncut"``, or the user's own schedule.
        caller: the state of the caller's thread.
        want: ``"loss"``, ``"outputs"``, or both.
        loss_fn: called with the outputs and the target; ``None``: the model's own loss.
        scale: multiplies the gradient that a micro-batch's backward starts from; ``None``: nothing.
        isolate_as: the pipeline's number for the sanitizer; ``None``: stages are not isolated.
        observer: sees what runs when; ``None``: nobody looks.
    """

    prepared: Prepared
    microbatches: list[Microbatch]
    weights: list[float]
    schedule: ScheduleOption
    caller: CallerState
    want: frozenset[str]
    loss_fn: Callable[..., Any] | None = None
    scale: Scale | None = None
    isolate_as: int | None = None
    observer: Observer | None = None

    @property
    def model(self) -> Module:
        """The user's model."""
        return self.prepared.model

    @property
    def is_cut(self) -> bool:
        """Whether the graph is cut between the stages."""
        return cuts_graphs(self.schedule)

    @cached_property
    def loss_kind(self) -> Any:
        """The key of the loss function among those that are known to draw random numbers or not."""
        return kind_of(self.loss_fn)
