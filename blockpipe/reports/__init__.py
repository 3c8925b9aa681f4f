"""Reports to users: tables, pictures, verdicts; public. Nothing here changes a step.

In: recordings, prepared models, traces. Out: summaries, memory, timelines, verifications, whose
classes this folder exports. Read first: ``inspector`` for the reports that need no step; then the
report's own folder, whose docstring says where a change goes.
"""

from ..preparation.memory.report import MemoryReport, StageMemory
from ..recording.calls import Call
from ..recording.entries import CrossingInfo, Hop, TensorInfo, Unmarked
from .find_chunks import ChunksReport, Trial
from .summary.data import Prediction
from .summary.rows import ModuleRow, StageRow
from .summary.summary import Summary
from .timeline.trace import Event, Lane, LaneTotals, StepInfo, Trace
from .verify.divergence import Divergence
from .verify.result import Difference, Verification, WholeBatch

__all__ = [
    "Call",
    "ChunksReport",
    "CrossingInfo",
    "Difference",
    "Divergence",
    "Event",
    "Hop",
    "Lane",
    "LaneTotals",
    "MemoryReport",
    "ModuleRow",
    "Prediction",
    "StageMemory",
    "StageRow",
    "StepInfo",
    "Summary",
    "TensorInfo",
    "Trace",
    "Trial",
    "Unmarked",
    "Verification",
    "WholeBatch",
]
