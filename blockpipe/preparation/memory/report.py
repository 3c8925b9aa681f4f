"""The report of a step's memory: by stage, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..._common.text import bytes_text, text_table


@dataclass
class StageMemory:
    """One stage's memory, in bytes.

    Attributes:
        stage: the stage's number.
        device: its device.
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters.
        optimizer: the optimizer's state.
        kept: activations of one micro-batch, from its forward to its backward.
        in_flight: the most micro-batches whose activations are kept at once.
        activations: all activations at the peak, under the schedule.
        glue: the part of ``kept`` that is saved outside of sealed calls, and never recomputed.
        crossings: tensors that a micro-batch brings from other stages; their gradients, which go
            back, take as much.
        working: memory of operations while they run; between accelerators also a micro-batch's
            copies that arrive before they are read, and the gradients that go back.
        measured: the measured peak; ``None`` where nothing was measured.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> adam = torch.optim.Adam(net.parameters())
        >>> first = pipe.memory(torch.ones(8, 4), optimizer=adam).stages[0]
        >>> first.parameters, first.gradients, first.optimizer
        (80, 80, 160)
    """

    stage: int
    device: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    in_flight: int = 0
    activations: int = 0
    glue: int = 0
    crossings: int = 0
    working: int = 0
    measured: int | None = None

    @property
    def peak(self) -> int:
        """The predicted peak: all of it together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


@dataclass
class MemoryReport:
    """Memory by stage, and how to need less; ``str()`` is a table.

    Attributes:
        stages: the memory of each stage.
        schedule: the name of the schedule.
        microbatches: the number of micro-batches in a step.
        suggestions: changes that would lower the highest peak, in words.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> [stage.parameters for stage in pipe.memory(x).stages]
        [80, 40]
    """

    stages: list[StageMemory]
    schedule: str
    microbatches: int
    suggestions: list[str] = field(default_factory=list)

    @property
    def by_device(self) -> dict[str, int]:
        """The predicted peak of each device: the sum of its stages'."""
        found: dict[str, int] = {}
        for stage in self.stages:
            found[stage.device] = found.get(stage.device, 0) + stage.peak
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = ["Stage", "Device", "Parameters", "Gradients", "Optimizer", "A micro-batch"]
        head += ["In flight", "Activations", "Working", "Peak", "Received"]
        has_measured = any(s.measured is not None for s in self.stages)
        rows = []
        for s in self.stages:
            sizes = [s.parameters, s.gradients, s.optimizer, s.kept]
            row = [str(s.stage), s.device, *map(bytes_text, sizes), str(s.in_flight)]
            row += [bytes_text(n) for n in (s.activations, s.working, s.peak, s.crossings)]
            if has_measured:
                row.append("-" if s.measured is None else bytes_text(s.measured))
            rows.append(row)
        text = text_table(head + ["Measured"] * has_measured, rows, left=2)
        notes = [f"{self.schedule}, {self.microbatches} micro-batches"]
        glue = [f"{bytes_text(s.glue)} on stage {s.stage}" for s in self.stages if s.glue]
        if glue:
            notes.append(f"glue keeps {', '.join(glue)} of a micro-batch: never recomputed")
        if len(self.by_device) < len(self.stages):
            devices = (f"{d}: {bytes_text(n)}" for d, n in self.by_device.items())
            notes.append(f"peaks of devices with several stages: {', '.join(devices)}")
        notes += self.suggestions
        return text + "\n\n" + "\n".join(f"note: {note}" for note in notes)
