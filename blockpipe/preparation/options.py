"""The options of a pipeline, checked before anything moves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from .._common.callsite import users_line
from .._common.hints import ALL_REDUCE
from ..batches.batch_dims import BatchDims
from ..batches.microbatch import LossReduction
from ..errors import MicrobatchError, PlanError, ScheduleError, UsageError
from ..schedules.builders import SCHEDULES, ScheduleOption, check_in_flight
from ..schedules.schedule import Schedule
from ..stages.plan import StagePlan

CHECKPOINTS = ("never", "except_last", "always")


def as_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (
        isinstance(sample, tuple)
        and len(sample) == 2
        and isinstance(sample[0], tuple | list)
        and isinstance(sample[1], Mapping)
    ):
        return tuple(sample[0]), dict(sample[1])
    if isinstance(sample, tuple | list):
        return tuple(sample), {}
    return (sample,), {}


def checked_offload(offload: object) -> frozenset[int] | Literal[True]:
    """The stages that are offloaded; ``True``: all."""
    if offload is True:
        return True
    stages = list(offload) if isinstance(offload, Iterable) else [] if offload is False else [None]
    if any(not isinstance(s, int) or isinstance(s, bool) or s < 0 for s in stages):
        raise PlanError(
            f"offload is True, False, or a list of stages such as [0, 1], but {offload!r} came"
        )
    return frozenset(s for s in stages if isinstance(s, int))


def check_plan(plan: object) -> None:
    """Raise :class:`PlanError` for what is no plan, or none that can be carried out."""
    if plan is None:
        return
    if not isinstance(plan, StagePlan):
        raise PlanError(
            f"plan is a StagePlan, but {type(plan).__name__} came; make one by "
            "record(model, args).plan, or StagePlan.from_json(text)"
        )
    plan.check()


def check_batch_dims(dims: object) -> None:
    """Raise :class:`MicrobatchError` for what names no dims."""
    values = list(dims.values()) if isinstance(dims, Mapping) else [dims]
    for value in values:
        is_list = value == "list" and isinstance(dims, Mapping)
        is_dim = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not is_list and not is_dim:
            raise MicrobatchError(
                "batch_dims is None, a number, or a mapping from an argument's position or name "
                f"to a number, 'list' or None, but {dims!r} came"
            )


# Why an option cannot be assigned, and what to do instead.
FIXED = {
    "module": "a pipeline is for one model; make another Pipeline",
    "devices": "the model is placed on them; call unplace(), and make another Pipeline",
    "plan": (
        "the model is placed by it; call set_pipeline_stage_assignment(pipe, …), or unplace() and "
        "make another Pipeline"
    ),
    "sample": "it is recorded at once; call the pipeline",
    "weights": "they are read when the pipeline is made; call load_weights(…)",
    "init": "it is called when the model is placed; make another Pipeline",
}


# By name: importing them takes time, and few have them.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}


def check_model(model: object) -> None:
    """Raise :class:`UsageError` for what is no module, or one that is spread out already."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"Pipeline takes an nn.Module, but {type(model).__name__} came")
    for path, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            where = f"{path!r} is a" if path else "the model is a"
            raise UsageError(
                f"{where} {type(module).__name__}, which acts on every backward, and a pipeline "
                f"has one for each micro-batch ({users_line()}); give Pipeline the module inside "
                f"of it, and {ALL_REDUCE}"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise UsageError(
                f"parameter {name!r} is a DTensor: the model is sharded (fully_shard, "
                f"parallelize_module), and a stage is on one device ({users_line()}); give "
                f"Pipeline the plain model, and {ALL_REDUCE}"
            )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How steps are run: all that may be assigned to a pipeline later, checked when it is made.

    Args:
        chunks: into how many micro-batches a batch is split.
        schedule: a name, one of the user's own, or a function that makes one.
        in_flight: at most so many micro-batches are under way at once.
        checkpoint: which micro-batches are recomputed.
        offload: stages whose activations are in host memory meanwhile; ``True``: all.
        deferred_batch_norm: whether running statistics are those of the whole batch.
        batch_dims: what is split where.
        loss_reduction: what the micro-batches' losses are to the batch's.
        isolate: whether the stage sanitizer is on.

    Raises:
        PlanError, ScheduleError, MicrobatchError, UsageError: what is no option, or does not go
            with another one.
    """

    chunks: int = 1
    schedule: ScheduleOption = "1f1b"
    in_flight: int | None = None
    checkpoint: str = "never"
    offload: frozenset[int] | Literal[True] = frozenset()
    deferred_batch_norm: bool = False
    batch_dims: BatchDims = None
    loss_reduction: LossReduction = "mean"
    isolate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            raise PlanError(f"chunks is a whole number from 1 on, but {self.chunks!r} came")
        check_schedule(self.schedule, self.chunks)
        check_in_flight(self.in_flight)
        if self.checkpoint not in CHECKPOINTS:
            raise UsageError(
                f"checkpoint is one of {CHECKPOINTS}, but {self.checkpoint!r} came; for some "
                "blocks only, write Block(stage=…, checkpoint=True)"
            )
        if not isinstance(self.deferred_batch_norm, bool):
            raise UsageError(
                f"deferred_batch_norm is True or False, but {self.deferred_batch_norm!r} came "
                f"({users_line()}); pass True for running statistics of the whole batch"
            )
        if self.loss_reduction not in ("mean", "sum") and not callable(self.loss_reduction):
            raise UsageError(
                "loss_reduction is 'mean', 'sum' or a callable (args, kwargs, target) -> number, "
                f"but {self.loss_reduction!r} came"
            )
        check_batch_dims(self.batch_dims)
        if self.offload and self.schedule == "uncut":
            raise UsageError(
                "offload brings activations back before a stage's backward, but schedule='uncut' "
                "has one backward for all stages; use checkpoint=, or another schedule"
            )
        if self.isolate and self.schedule == "uncut":
            raise UsageError(
                "isolate=True proves that stages are cut apart, but schedule='uncut' does not cut "
                "them; use 'sequential' to look at one micro-batch at a time"
            )

    @property
    def cuts(self) -> bool:
        """Whether the graph is cut between the stages."""
        return self.schedule != "uncut"

    def prepared_for(self) -> tuple[Any, ...]:
        """What a recording, and all that is worked out from it, depends on."""
        # What is shared between stages is an error under some schedules; others are made by the
        # step.
        kind = self.schedule if self.schedule in ("sequential", "uncut") else "cut"
        return kind, self.in_flight, self.checkpoint, self.offload, self.deferred_batch_norm


OPTIONS = tuple(field.name for field in fields(PipelineOptions))


def check_graphs(*, cuda_graphs: bool, deferred_batch_norm: bool) -> None:
    """Raise :class:`UsageError` for two options that do not go together."""
    if cuda_graphs and deferred_batch_norm:
        raise UsageError(
            "cuda_graphs=True replays forwards without their Python, but "
            "deferred_batch_norm=True has to look at every input of a batch norm; leave one "
            f"of them out ({users_line()})"
        )


def check_loss(loss_fn: object, target: object) -> None:
    """Raise :class:`UsageError` for a loss that cannot be called, or a target without one."""
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f"loss_fn is a callable (output, target) -> loss, but {loss_fn!r} came ({users_line()})"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise UsageError(
            f"loss_fn is a callable (output, target) -> loss, but the class {loss_fn.__name__} "
            f"came ({users_line()}); pass an instance of it: loss_fn={loss_fn.__name__}()"
        )
    if target is not None and loss_fn is None:
        raise UsageError(
            "a target needs a loss_fn to be compared by, but none came; pass loss_fn=…, or "
            "give the model its labels as an argument, by position if its name is target "
            f"({users_line()})"
        )


def check_schedule(schedule: object, chunks: int) -> None:
    """Raise :class:`ScheduleError` for what names no schedule, or one for other micro-batches."""
    names = [*SCHEDULES, "auto", "uncut"]
    if isinstance(schedule, Schedule):
        if schedule.microbatches != chunks:
            raise ScheduleError(
                f"schedule {schedule.name!r} is for {schedule.microbatches} micro-batches, but "
                f"chunks={chunks}; pass chunks={schedule.microbatches}"
            )
    elif schedule not in names and not callable(schedule):
        raise ScheduleError(
            f"schedule is one of {names}, a Schedule, or a function (lane_of_hop, microbatches) -> "
            f"Schedule, but {schedule!r} came"
        )
