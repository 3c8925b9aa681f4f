"""The data of a summary, which its views are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .rows import ModuleRow, StageRow


@dataclass
class Prediction:
    """A pipeline's prediction of a step.

    Attributes:
        schedule: the name of the schedule that was played out.
        microbatches: the number of micro-batches.
        step_seconds: the time of a step, without the optimizer's.
        bubble: the share of all lanes' time in which they idle, 0 to 1.
        restore_seconds: for each stage, the time of recomputing a micro-batch.
        peak_bytes: for each stage, the memory's peak without an optimizer's state.
        one_thread: whether operations are so small that one thread runs the step: no lane idles.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> pipe.summary(x).prediction.microbatches
        4
    """

    schedule: str
    microbatches: int
    step_seconds: float
    bubble: float
    restore_seconds: list[float]
    peak_bytes: list[int]
    one_thread: bool = False


@dataclass(repr=False)
class SummaryData:
    """The fields of a :class:`blockpipe.reports.Summary`."""

    model: str
    modules: list[ModuleRow]
    stages: list[StageRow]
    crossings: list[dict[str, Any]]
    tied: list[dict[str, Any]]
    unused: list[str]
    unmarked: list[dict[str, Any]]
    notes: list[str]
    parameters: int
    bytes: int
    rates: str
    prediction: Prediction | None = None
    columns: list[str] = field(default_factory=list)

    @property
    def imbalance(self) -> float | None:
        """The slowest stage's predicted time over the mean; ``None`` if no stage takes any."""
        seconds = [stage.seconds for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else None
