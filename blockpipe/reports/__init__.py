"""What users are told: tables, pictures, verdicts; public. Nothing here changes a step.

In: recordings, prepared models, traces. Out: summaries, memory, timelines, verifications, whose
classes this folder exports. Read first: ``inspector`` for what is asked before a step; then the
folder of the report.
"""

from ..preparation.memory_model import MemoryReport, StageMemory
from ..recording.recording import Call, CrossingInfo, Held, Hop, Unmarked
from .find_chunks import ChunksReport, Trial
from .summary.data import Prediction
from .summary.rows import ModuleRow, StageRow
from .summary.summary import Summary
from .timeline.trace import Event, Lane, LaneTotals, StepInfo, Trace
from .verify.divergence import Parting
from .verify.result import Difference, Verification, WholeBatch

__all__ = [
    # A recording's lists
    "Call",
    "CrossingInfo",
    "Held",
    "Hop",
    "Unmarked",
    # Summaries
    "ModuleRow",
    "Prediction",
    "StageRow",
    "Summary",
    # Memory, and numbers of micro-batches
    "ChunksReport",
    "MemoryReport",
    "StageMemory",
    "Trial",
    # Timelines
    "Event",
    "Lane",
    "LaneTotals",
    "StepInfo",
    "Trace",
    # Verification
    "Difference",
    "Parting",
    "Verification",
    "WholeBatch",
]
