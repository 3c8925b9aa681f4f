"""A plan with the costs of its stages, the stage that limits it, and its marks."""

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
        stage: the stage's number.
        begins: the path of the module that begins it; for the first stage, ``"the start"``.
        call: the number of that module's call.
        segments: the number of its segments; a stage could begin at each of them.
        cost: the quantity that was balanced, with crossings, speeds and extra costs.
        forward: the seconds of one micro-batch's forward, on this stage's device.
        backward: the seconds of its backward.
        elements: the number of elements of the parameters that live here.
        parameters: the bytes of the parameters that live here.
        memory: the predicted peak in bytes.
        received: the bytes of a micro-batch that come from other stages.
        limit: the bytes that the stage may need; ``None`` if no limit was given.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> share = bp.balance(net, torch.zeros(8, 4), 2, "parameters").shares[1]
        >>> share.stage, share.begins, share.elements, share.parameters
        (1, '2', 40, 160)
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
    """The result of :func:`balance`: a plan with the costs of its stages. ``print`` shows a table.

    It is a :class:`StagePlan` like any other, for ``Pipeline(model, plan=plan)``. The figures
    describe the plan as it was computed; ``assign`` does not update them.

    Attributes:
        shares: one entry for each stage.
        by: the quantity that was balanced.
        source: where the costs come from.
        bottleneck: a sentence that says what limits the costliest stage.
        step_seconds: the predicted time of a step, without the optimizer's.
        simulation: the schedule played out; ``None`` if a step runs in one thread, without one.
        notes: further notes on the plan.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> plan = bp.balance(net, torch.zeros(8, 4), 2, "parameters")
        >>> [(share.begins, share.elements) for share in plan.shares]
        [('the start', 40), ('2', 40)]
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
        """Return the plan as lines of Python, to paste where the model is built.

        The model is called ``model`` there. The lines first take off old marks, and stages that
        are set on it. Where marks cannot express the plan, they are comments that say why.
        """
        return self.marks_text

    @property
    def bubble(self) -> float:
        """The share of all lanes' time in which they are predicted to idle, 0 to 1."""
        return 0.0 if self.simulation is None else self.simulation.bubble

    @property
    def imbalance(self) -> float:
        """The costliest stage's cost over the mean of all; 1 if they are equal."""
        costs = [share.cost for share in self.shares]
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if not self.shares:
            return super().__str__()
        schedule = "one thread" if self.simulation is None else self.simulation.schedule.name
        lines = [
            f"{self.model} in {len(self.shares)} stages, by {self.by} ({self.source})",
            "",
            self._cost_table(),
            "",
            _memory_table(self.shares),
            "",
            *wrap(self.bottleneck, 100),
            f"predicted: {seconds_text(self.step_seconds)} for a step of {self.microbatches} "
            f"micro-batches ({schedule}, {100 * self.bubble:.1f} % bubble)",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def _cost_table(self) -> str:
        show = UNITS[self.by]
        total = sum(share.cost for share in self.shares) or 1.0
        most = max(share.cost for share in self.shares) or 1.0
        head = ["Stage", "Begins at", "", self.by.capitalize(), "Share", "Forward", "Backward"]
        rows = [
            [
                str(share.stage),
                share.begins + (f" (call {share.call})" if share.call else ""),
                bar(share.cost / most),
                show(share.cost),
                f"{100 * share.cost / total:.1f} %",
                seconds_text(share.forward),
                seconds_text(share.backward),
            ]
            for share in self.shares
        ]
        return text_table(head, rows, left=3)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as data for JSON: each stage, the marks, and the plan."""
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


def _memory_table(shares: list[StageShare]) -> str:
    head = ["Stage", "Segments", "Parameters", "Peak memory", "Limit", "Received"]
    rows = [
        [
            str(share.stage),
            str(share.segments),
            f"{share.elements:,}",
            bytes_text(share.memory),
            "-" if share.limit is None else bytes_text(share.limit),
            bytes_text(share.received),
        ]
        for share in shares
    ]
    return text_table(head, rows, left=1)


def _bytes_text(count: float) -> str:
    return bytes_text(round(count))


UNITS: dict[str, Callable[[float], str]] = {
    "time": seconds_text,
    "memory": _bytes_text,
    "parameters": _bytes_text,
    "flops": flops_text,
}
