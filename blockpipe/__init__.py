"""Declarative pipeline parallelism for any PyTorch model, from marks in its own forward."""

from typing import TYPE_CHECKING, NoReturn

from . import errors
from ._common.checks import near_miss
from ._common.log import set_log_level
from .compat.device_map import from_device_map
from .compat.keras.assignment import (
    get_pipeline_stage_assignment,
    reset_pipeline_stage_assignment,
    set_pipeline_stage_assignment,
)
from .compat.keras.table import print_pipeline_stage_assignment_summary
from .costs.meter import host_syncs
from .errors import BlockpipeError
from .execution.step_result import StepResult
from .partitioning.balance import balance
from .partitioning.balanced_plan import BalancedPlan, StageShare
from .partitioning.partition import partition_balanced, partition_uniform
from .pipeline import Pipeline
from .recording.record import record
from .recording.recording import Recording
from .reports.timeline.timeline import Timeline
from .schedules.schedule import Action, Schedule
from .schedules.simulation import Costs, simulate
from .stages.assignment import Assignment
from .stages.cursor import current_microbatch, current_stage, is_recomputing
from .stages.marks import BeginBlock, Block, BlockFunction, begin_blocks, remove_blocks
from .stages.plan import StagePlan
from .stages.sequential import mark_sequential
from .weights.materialize import materialize

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
    # Stages as data on a model
    "get_pipeline_stage_assignment",
    "print_pipeline_stage_assignment_summary",
    "reset_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
    # Where to cut
    "BalancedPlan",
    "StageShare",
    "balance",
    "mark_sequential",
    "partition_balanced",
    "partition_uniform",
    # Schedules
    "Action",
    "Costs",
    "Schedule",
    "simulate",
    # The pipeline
    "Pipeline",
    "StepResult",
    "Timeline",
    "from_device_map",
    "host_syncs",
    "set_log_level",
    # Errors
    "BlockpipeError",
]

if not TYPE_CHECKING:  # type checkers report a missing name as it is

    def __getattr__(name: str) -> NoReturn:
        """Raise an error that names the module of a public name that is elsewhere."""
        elsewhere = {"dry_run": "testing", "make_schedule": "schedules", "testing": ""}
        elsewhere |= {"GPipe": "compat.torchgpipe", "Replicas": "replicas"}
        elsewhere |= {"Pipe": "compat.fairscale.nn", "PipelineStage": "compat.keras"}
        elsewhere |= {"PipelineTrainer": "integrations.transformers"}
        elsewhere |= {"PipelineAccelerator": "integrations.accelerate"}
        elsewhere |= {"PipelineStrategy": "integrations.lightning"}
        elsewhere |= dict.fromkeys(errors.__all__, "errors")
        module = elsewhere.get(name)
        if module is not None:
            hint = (
                f"from blockpipe.{module} import {name}" if module else f"import blockpipe.{name}"
            )
        elif not name.startswith("_") and callable(getattr(Pipeline, name, None)):
            hint = f"it is a method of a pipeline: Pipeline(…).{name}(…)"
        else:
            near = near_miss(name, __all__)
            hint = f"did you mean {near!r}?" if near is not None else ""
        hint = hint and f"; {hint}"
        raise AttributeError(f"module 'blockpipe' has no attribute {name!r}{hint}")
