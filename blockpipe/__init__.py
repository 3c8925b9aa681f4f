"""Declarative pipeline parallelism for any PyTorch model, from marks in its own forward."""

from .blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    begin_blocks,
    current_microbatch,
    current_stage,
    is_recomputing,
    remove_blocks,
)
from .capture import record
from .errors import BlockpipeError
from .materialize import materialize
from .meter import host_syncs
from .pipeline import Pipeline, StepResult
from .plan import Assignment, StagePlan
from .recording import Recording
from .schedule import Action, Schedule
from .simulate import Costs, simulate
from .timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    # Marks
    "BeginBlock",
    "Block",
    "BlockFunction",
    "begin_blocks",
    "remove_blocks",
    # Where a forward is
    "current_microbatch",
    "current_stage",
    "is_recomputing",
    # From marks to a plan
    "Assignment",
    "Recording",
    "StagePlan",
    "materialize",
    "record",
    # Schedules
    "Action",
    "Costs",
    "Schedule",
    "simulate",
    # The pipeline
    "Pipeline",
    "StepResult",
    "Timeline",
    "host_syncs",
    # Errors
    "BlockpipeError",
]
