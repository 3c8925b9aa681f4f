"""Declarative pipeline parallelism for any PyTorch model, from marks in its own forward."""

from .blocks import BeginBlock, Block, BlockFunction, begin_blocks, current_stage, remove_blocks
from .capture import record
from .errors import BlockpipeError
from .execution import current_microbatch
from .pipeline import Pipeline, StepResult
from .plan import Assignment, StagePlan
from .recording import Recording

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
    # From marks to a plan
    "Assignment",
    "Recording",
    "StagePlan",
    "record",
    # The pipeline
    "Pipeline",
    "StepResult",
    # Errors
    "BlockpipeError",
]
