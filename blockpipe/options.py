"""The options of a pipeline, checked before anything moves."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .errors import MicrobatchError, PlanError, ScheduleError, UsageError
from .plan import StagePlan
from .schedule import Schedule
from .scheduler import SCHEDULES, check_in_flight
from .transfer import check_device, is_asynchronous
from .where import users_line

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


def checked_devices(devices: Sequence[Any] | None) -> list[torch.device] | None:
    if devices is None:
        return None
    if isinstance(devices, str | torch.device | int):
        if isinstance(devices, int) and not isinstance(devices, bool):
            raise PlanError(
                "devices is a list with one device for each stage, but a number came; write "
                f"devices={[*range(devices)]} for the first {devices} accelerators, or "
                f"devices=['cpu'] * {devices}"
            )
        name = str(devices) if isinstance(devices, torch.device) else devices
        raise PlanError(
            f"devices is a list with one device for each stage, but {name!r} came; "
            f"write devices=[{name!r}, …]"
        )
    if not isinstance(devices, Sequence):
        raise PlanError(
            f"devices is a list with one device for each stage, but {type(devices).__name__} came; "
            "write devices=[…], in the order of the stages"
        )
    checked = [check_device(device) for device in devices]
    if not checked:
        raise PlanError("devices is empty; pass one for each stage, or None for all there are")
    kinds = {device.type for device in checked if is_asynchronous(device)}
    if len(kinds) > 1:
        raise PlanError(f"stages are on accelerators of one kind, but {sorted(kinds)} came")
    return checked


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


ALL_REDUCE = (
    "all-reduce the gradients after forward_backward: "
    "for p in pipe.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
)
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


def check_options(
    *,
    chunks: object,
    schedule: object,
    in_flight: object,
    checkpoint: object,
    offload: object,
    deferred_batch_norm: object,
    batch_dims: object,
    loss_reduction: object,
    isolate: object,
) -> None:
    """Raise for what is no option, or does not go with another one.

    Its arguments are all that can be assigned to a pipeline later.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise PlanError(f"chunks is a whole number from 1 on, but {chunks!r} came")
    check_schedule(schedule, chunks)
    check_in_flight(in_flight)
    if checkpoint not in CHECKPOINTS:
        raise UsageError(
            f"checkpoint is one of {CHECKPOINTS}, but {checkpoint!r} came; for some blocks only, "
            "write Block(stage=…, checkpoint=True)"
        )
    if not isinstance(deferred_batch_norm, bool):
        raise UsageError(
            f"deferred_batch_norm is True or False, but {deferred_batch_norm!r} came "
            f"({users_line()}); pass True for running statistics of the whole batch"
        )
    if loss_reduction not in ("mean", "sum") and not callable(loss_reduction):
        raise UsageError(
            "loss_reduction is 'mean', 'sum' or a callable (args, kwargs, target) -> number, but "
            f"{loss_reduction!r} came"
        )
    check_batch_dims(batch_dims)
    if checked_offload(offload) and schedule == "uncut":
        raise UsageError(
            "offload brings activations back before a stage's backward, but schedule='uncut' "
            "has one backward for all stages; use checkpoint=, or another schedule"
        )
    if isolate and schedule == "uncut":
        raise UsageError(
            "isolate=True proves that stages are cut apart, but schedule='uncut' does not cut "
            "them; use 'sequential' to look at one micro-batch at a time"
        )


OPTIONS = tuple(inspect.signature(check_options).parameters)


def prepared_for(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a recording, and all that is worked out from it, depends on among the options."""
    names = ("in_flight", "checkpoint", "offload", "deferred_batch_norm")
    schedule = options["schedule"]
    # What is shared between stages is an error under some schedules; others are made by the step.
    kind = schedule if schedule in ("sequential", "uncut") else "cut"
    return kind, *(options[name] for name in names)


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
