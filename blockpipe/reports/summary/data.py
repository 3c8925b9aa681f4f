"""What a summary is made of, as data: its views are drawn from that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .rows import ModuleRow, StageRow


@dataclass
class Prediction:
    """What a pipeline knows of a step, besides the recording.

    Attributes:
        schedule: the name of what was played out.
        microbatches: how many the batch makes.
        step_seconds: how long a step takes; that the optimizer takes is not in it.
        bubble: the share of all lanes' time in which they idle, 0 to 1.
        restore_seconds: by stage, what recomputing a micro-batch takes.
        peak_bytes: by stage, without an optimizer's state.
        one_thread: operations are so small that one thread runs the step, and no lane idles.
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
        """The slowest stage's predicted time over the mean; ``None``: nothing takes time."""
        seconds = [stage.seconds for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else None
