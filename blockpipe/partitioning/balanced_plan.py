"""A plan that says why it is what it is: what each stage costs, what limits it, and its marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from .._common.text import bar, bytes_text, flops_text, seconds_text, text_table
from ..schedules.simulation import Simulation
from ..stages.plan import StagePlan


@dataclass
class StageShare:
    """One stage of a :class:`BalancedPlan`.

    Attributes:
        stage: its number.
        begins: the path of the module that begins it; the first stage: ``"the start"``.
        call: which of that module's calls.
        segments: what it is made of: a stage can begin at each of them, taken alone.
        cost: in the unit of ``by``, as it was balanced: with crossings, speeds and extra weight.
        forward: seconds of one micro-batch's forward, on this stage's device.
        backward: seconds of its backward.
        elements: numbers in the parameters that live here.
        parameters: bytes of them.
        memory: the predicted peak in bytes.
        received: bytes that a micro-batch brings from other stages.
        limit: bytes of the device; ``None``: none was given.
    """

    stage: int
    begins: str
    call: int
    segments: int
    cost: float
    forward: float
    backward: float
    elements: int
    parameters: int
    memory: int
    received: int
    limit: int | None = None


@dataclass(repr=False)
class BalancedPlan(StagePlan):
    """What :func:`balance` returns: a plan, and what its stages cost. ``print`` shows a table.

    It is a :class:`StagePlan` like any other, for ``Pipeline(model, plan=plan)``. What is said of
    the stages is of the plan as it was made: ``assign`` does not change it.

    Attributes:
        shares: one for each stage.
        by: what was balanced.
        source: where the costs come from.
        bottleneck: what limits the costliest stage, in words.
        step_seconds: predicted for a step, without the optimizer's.
        simulation: of the schedule; ``None``: a step runs in one thread, without a schedule.
        notes: what else there is to know.
    """

    model: str = ""
    shares: list[StageShare] = field(default_factory=list)
    by: str = "time"
    source: str = ""
    bottleneck: str = ""
    step_seconds: float = 0.0
    microbatches: int = 1
    simulation: Simulation | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list)
    marks_text: str = field(default="", repr=False)

    def marks(self) -> str:
        """The plan as lines of Python, to paste where the model is built; it is called ``model``
        there. They first take off old marks, and stages that are set on it. Where marks cannot say
        what the plan says, comments tell why."""
        return self.marks_text

    @property
    def bubble(self) -> float:
        """The share of all lanes' time in which they are predicted to idle, 0 to 1."""
        return 0.0 if self.simulation is None else self.simulation.bubble

    @property
    def imbalance(self) -> float:
        """The costliest stage's cost over the mean of all; 1: they are equal."""
        costs = [share.cost for share in self.shares]
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if not self.shares:
            return super().__str__()
        show = UNITS[self.by]
        total = sum(share.cost for share in self.shares) or 1.0
        most = max(share.cost for share in self.shares) or 1.0
        costs, holds = [], []
        for share in self.shares:
            begins = share.begins + (f" (call {share.call})" if share.call else "")
            costs.append(
                [
                    str(share.stage),
                    begins,
                    bar(share.cost / most),
                    show(share.cost),
                    f"{100 * share.cost / total:.1f} %",
                    seconds_text(share.forward),
                    seconds_text(share.backward),
                ]
            )
            limit = "-" if share.limit is None else bytes_text(share.limit)
            holds.append(
                [
                    str(share.stage),
                    str(share.segments),
                    f"{share.elements:,}",
                    bytes_text(share.memory),
                    limit,
                    bytes_text(share.received),
                ]
            )
        head = ["Stage", "Begins at", "", self.by.capitalize(), "Share", "Forward", "Backward"]
        of_what = ["Stage", "Pieces", "Parameters", "Peak memory", "Limit", "Received"]
        schedule = "one thread" if self.simulation is None else self.simulation.schedule.name
        lines = [
            f"{self.model} in {len(self.shares)} stages, by {self.by} ({self.source})",
            "",
            text_table(head, costs, left=3),
            "",
            text_table(of_what, holds, left=1),
            "",
            *wrap(self.bottleneck, 100),
            f"predicted: {seconds_text(self.step_seconds)} for a step of {self.microbatches} "
            f"micro-batches ({schedule}, {100 * self.bubble:.1f} % bubble)",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as data for JSON: each stage, the marks, and the plan."""
        return {
            "model": self.model,
            "by": self.by,
            "source": self.source,
            "stages": [asdict(share) for share in self.shares],
            "bottleneck": self.bottleneck,
            "microbatches": self.microbatches,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "notes": self.notes,
            "marks": self.marks_text,
            "layout": self.layout,
            "plan": json.loads(self.to_json()),
        }


def _bytes_text(count: float) -> str:
    return bytes_text(round(count))


UNITS: dict[str, Callable[[float], str]] = {
    "time": seconds_text,
    "memory": _bytes_text,
    "parameters": _bytes_text,
    "flops": flops_text,
}
