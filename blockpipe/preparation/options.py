"""The options of a pipeline, checked before anything moves."""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

from torch import nn

from .._common.callsite import users_line, warn
from .._common.checks import expected, is_integer
from .._common.hints import REPLICATED
from .._common.modules import paths_around
from .._torch.modules import children_of
from ..batches.batch_dims import BatchDims, CallDims, dims_of_call
from ..batches.microbatch import LossReduction, Microbatch, split
from ..errors import MicrobatchError, PlanError, ScheduleError, UsageError
from ..schedules.builders import SCHEDULES, ScheduleOption, check_in_flight, cuts_graphs
from ..schedules.schedule import Schedule
from ..stages.plan import StagePlan
from ..weights.accelerate_hooks import offloaded_modules

T = TypeVar("T")

CHECKPOINTS = ("never", "except_last", "always")


def check_checkpoint(checkpoint: object) -> None:
    """Raise :class:`UsageError` for a value that is no ``checkpoint=``."""
    if checkpoint not in CHECKPOINTS:
        names = ", ".join(map(repr, CHECKPOINTS))
        fix = "for some blocks only, write Block(stage=…, checkpoint=True)"
        raise UsageError(expected(f"one of {names}", checkpoint, for_="checkpoint", fix=fix))


def recomputes(checkpoint: str, microbatch: int, microbatches: int) -> bool:
    """Return whether a micro-batch is recomputed where no mark says otherwise."""
    if checkpoint == "except_last":
        return microbatch < microbatches - 1
    return checkpoint == "always"


def as_sample(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample as arguments and keyword arguments; it may also be the arguments alone, or
    one of them."""
    if isinstance(sample, tuple) and len(sample) == 2:
        args, kwargs = sample
        if isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            return tuple(args), dict(kwargs)
    if isinstance(sample, tuple | list):
        return tuple(sample), {}
    return (sample,), {}


def checked_offload(offload: object) -> frozenset[int] | Literal[True]:
    """Return the stages that are offloaded; ``True`` is all of them."""
    if offload is True:
        return True
    stages = list(offload) if isinstance(offload, Iterable) else [] if offload is False else [None]
    if not all(is_integer(stage, 0) for stage in stages):
        raise PlanError(
            expected("True, False or a list of stages", offload, for_="offload", fix="pass [0, 1]")
        )
    return frozenset(stage for stage in stages if stage is not None)


def check_plan(plan: object) -> None:
    """Raise :class:`PlanError` for a value that is no plan, or a plan that contradicts itself."""
    if plan is None:
        return
    if not isinstance(plan, StagePlan):
        fix = "take record(model, args).plan, or StagePlan.from_json(text)"
        if isinstance(plan, str):
            fix = "write StagePlan.from_layout('layer3=1'), or StagePlan.load(path) for a file"
        elif isinstance(plan, Mapping):
            fix = "mark the model by it: begin_blocks(model, {'layer3': 1})"
        raise PlanError(expected("a StagePlan", plan, for_="plan", fix=fix))
    plan.check()


def check_batch_dims(dims: object) -> None:
    """Raise :class:`MicrobatchError` for a value that names no dims."""
    if isinstance(dims, CallDims):
        return  # made by Blockpipe
    values = list(dims.values()) if isinstance(dims, Mapping) else [dims]
    for value in values:
        is_list = value == "list" and isinstance(dims, Mapping)
        if value is not None and not is_list and not is_integer(value):
            raise MicrobatchError(
                expected(
                    "an integer, None, or a mapping from arguments to integers, 'list' or None",
                    dims,
                    for_="batch_dims",
                    fix="name arguments by position or name: {0: 1, 'mask': None}",
                )
            )


# By option: why it cannot be assigned, and what to do instead.
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
_MISSING_FORWARDS = {nn.Module.forward.__qualname__, "LightningModule.forward"}


def check_model(model: object) -> None:
    """Raise :class:`UsageError` for a model that is no module, has no forward or weights on no
    device, or is on several devices already."""
    if not isinstance(model, nn.Module):
        raise UsageError(expected("an nn.Module", model, for_="model of Pipeline"))
    if getattr(getattr(model, "forward", None), "__qualname__", None) in _MISSING_FORWARDS:
        raise UsageError(
            f"expected a model with a forward, got {type(model).__name__} without one "
            f"({users_line()}); write one, or make the pipeline of the part that has one, inside "
            "of it: self.net = Pipeline(self.net, …)"
        )
    for path, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            where = f"{path!r} is a" if path else "the model is a"
            raise UsageError(
                f"{where} {type(module).__name__}, which acts on every backward, and a pipeline "
                f"has one for each micro-batch ({users_line()}); pass Pipeline the module inside "
                f"of it, and {REPLICATED}"
            )
        _check_children(model, path, module)
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise UsageError(
                f"parameter {name!r} is a DTensor: the model is sharded (fully_shard, "
                f"parallelize_module), and a stage is on one device ({users_line()}); pass "
                f"Pipeline the plain model, and {REPLICATED}"
            )
    offloaded = offloaded_modules(model)
    if offloaded:
        raise UsageError(
            f"expected a model with its weights on devices, got one of which Accelerate keeps "
            f"{offloaded[:3]} in host memory or on disk ('cpu' or 'disk' in its device map; "
            f"{users_line()}): a stage's weights stay on its device; load it with a device_map of "
            "devices alone, or on the meta device and pass weights=… to Pipeline"
        )


def _check_children(model: nn.Module, path: str, module: nn.Module) -> None:
    for name, child in children_of(module).items():
        if type(child) not in weakref.ProxyTypes:
            continue
        real = cast(Any, child).__repr__.__self__  # what a proxy answers, its object answers
        if any(real is one for one in (module, *map(model.get_submodule, paths_around(path)))):
            full = f"{path}.{name}" if path else name
            raise UsageError(
                f"expected modules inside of each other, got {full!r}, a weak proxy of one around "
                f"it, which torch has registered as a submodule ({users_line()}); keep a weak "
                "reference (weakref.ref), or set it by object.__setattr__"
            )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of a pipeline that may be assigned later; checked when this value is made.

    Users read about them in :class:`blockpipe.Pipeline`.

    Args:
        chunks: the number of micro-batches that a batch is split into.
        schedule: a schedule's name, the user's own, or a function that makes one.
        in_flight: the most micro-batches that are under way at once.
        checkpoint: the micro-batches that are recomputed.
        offload: the stages whose activations are in host memory between forward and backward.
        deferred_batch_norm: whether running statistics are those of the whole batch.
        batch_dims: the dim on which each argument is split.
        loss_reduction: how the micro-batches' losses make up the batch's.
        isolate: whether the stage sanitizer is on.

    Raises:
        PlanError, ScheduleError, MicrobatchError, UsageError: an option is wrong, or does not go
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
        if not is_integer(self.chunks, 1):
            raise PlanError(
                expected("a positive integer", self.chunks, for_="chunks", fix="pass chunks=4")
            )
        check_schedule(self.schedule, self.chunks)
        check_in_flight(self.in_flight)
        check_checkpoint(self.checkpoint)
        if not isinstance(self.deferred_batch_norm, bool):
            fix = "pass True for running statistics of the whole batch"
            raise UsageError(
                expected(
                    "True or False", self.deferred_batch_norm, for_="deferred_batch_norm", fix=fix
                )
            )
        _check_reduction(self.loss_reduction)
        check_batch_dims(self.batch_dims)
        if self.offload and self.schedule == "uncut":
            raise UsageError(
                "offload brings activations back before a stage's backward, but schedule='uncut' "
                f"has one backward for all stages ({users_line()}); use checkpoint=, or another "
                "schedule"
            )
        if self.isolate and self.schedule == "uncut":
            raise UsageError(
                "isolate=True proves that stages are cut apart, but schedule='uncut' does not cut "
                f"them ({users_line()}); use 'sequential' to look at one micro-batch at a time"
            )

    @property
    def cuts(self) -> bool:
        """Whether the graph is cut between the stages."""
        return cuts_graphs(self.schedule)

    def split(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> list[Microbatch]:
        """Split the arguments of a model, and a target for the loss, into micro-batches."""
        dims = dims_of_call(model, self.batch_dims, args, kwargs, target)
        return split(args, kwargs, target, self.chunks, dims, cut=self.cuts)

    @property
    def shares_by(self) -> ScheduleOption:
        """The schedule whose rules say what micro-batches may share: a single one is as one of
        ``"sequential"``. The user's own schedule is played as it is, on lanes that run at once."""
        is_alone = self.chunks == 1 and isinstance(self.schedule, str)
        return "sequential" if is_alone and self.schedule != "uncut" else self.schedule

    def prepared_for(self) -> tuple[Any, ...]:
        """Return the options that a recording, and all that follows from it, depends on."""
        # State that stages share is an error under some schedules, which all others have in common.
        kind = self.shares_by if self.shares_by in ("sequential", "uncut") else "cut"
        return kind, self.in_flight, self.checkpoint, self.offload, self.deferred_batch_norm


OPTIONS = tuple(field.name for field in fields(PipelineOptions))


class Option(Generic[T]):
    """One of the options of a pipeline, as an attribute of it.

    It is read from the options that the pipeline has as ``_options``, and set by its
    ``__setattr__``, which checks it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, pipe: None, owner: type) -> Self: ...
    @overload
    def __get__(self, pipe: object, owner: type) -> T: ...

    def __get__(self, pipe: Any, owner: type) -> T | Self:
        return self if pipe is None else cast(T, getattr(pipe._options, self._name))

    def __set__(self, pipe: object, value: T) -> None:
        setattr(pipe, self._name, value)


def check_graphs(*, cuda_graphs: bool, deferred_batch_norm: bool) -> None:
    """Raise :class:`UsageError` for CUDA graphs with deferred batch norm."""
    if cuda_graphs and deferred_batch_norm:
        raise UsageError(
            "cuda_graphs=True replays forwards without their Python, but "
            "deferred_batch_norm=True has to look at every input of a batch norm "
            f"({users_line()}); leave one of them out"
        )


def check_loss(loss_fn: object, target: object, others: Iterable[str] = ()) -> None:
    """Raise :class:`UsageError` for a loss that cannot be called, or a target without one.

    Args:
        loss_fn: as the user gave it.
        target: as the user gave it.
        others: the names of the call's further arguments.
    """
    contract = "a callable (output, target) -> loss"
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(expected(contract, loss_fn, for_="loss_fn"))
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        fix = f"pass an instance of the class: loss_fn={loss_fn.__name__}()"
        raise UsageError(expected(contract, loss_fn, for_="loss_fn", fix=fix))
    if target is None and loss_fn is not None and _needs_target(loss_fn):
        raise UsageError(
            f"expected a target for a loss_fn that takes two arguments, got none ({users_line()}); "
            "pass what it compares the output with by name: target=…, or leave loss_fn out if the "
            "model computes its own loss"
        )
    meant = next((name for name in others if name in ("criterion", "loss", "loss_func")), None)
    if target is not None and loss_fn is None and meant is not None:
        raise UsageError(
            f"a target was given, but no loss_fn to compare it by ({users_line()}); pass loss_fn= "
            f"in the place of {meant}=, which goes to the model"
        )
    if target is not None and loss_fn is None:
        raise UsageError(
            f"a target was given, but no loss_fn to compare it by ({users_line()}); pass "
            "loss_fn=…, or, to a model that computes its own loss from an argument of that name, "
            "model_kwargs={'target': …}"
        )


def _check_reduction(given: object) -> None:
    """Check that a loss_reduction is one of the names, or takes three arguments."""
    if isinstance(given, str) and given in ("mean", "sum"):
        return
    fits = callable(given)
    if fits:
        try:
            inspect.signature(given).bind(None, None, None)  # type: ignore[arg-type]
        except TypeError:
            fits = False
        except ValueError:
            pass  # a builtin without a signature
    if not fits:
        fix = "a callable is (args, kwargs, target) -> number"
        contract = "'mean', 'sum' or a callable with three arguments"
        raise UsageError(expected(contract, given, for_="loss_reduction", fix=fix))


def _needs_target(loss_fn: Any) -> bool:
    """Return whether a loss can be called with two arguments and not with one."""
    try:
        takes = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
        takes.bind(None, None)
    except (TypeError, ValueError):  # another number of them, or a builtin without a signature
        return False
    try:
        takes.bind(None)
    except TypeError:
        return True
    return False


def check_reduction(
    loss_fn: object, kwargs: Mapping[str, Any], loss_reduction: LossReduction, chunks: int
) -> None:
    """Look for a loss that is no mean over the samples, although ``loss_reduction`` says so.

    Raises:
        UsageError: the model is to divide each micro-batch's loss by a number of the whole batch.
    """
    if loss_reduction == "sum" or chunks == 1:
        return
    items = kwargs.get("num_items_in_batch")
    if kwargs.get("labels") is not None and items is not None and not getattr(items, "ndim", 0):
        raise UsageError(
            "expected losses of micro-batches that are means, got num_items_in_batch, by which "
            "the model divides each of them, as in a call by Hugging Face's Trainer "
            f"({users_line()}); use blockpipe.integrations.transformers.PipelineTrainer in its "
            "place, or pass loss_reduction='sum' to Pipeline"
        )
    if loss_reduction == "mean" and getattr(loss_fn, "reduction", None) == "sum":
        warn(
            f"loss_fn has reduction='sum', but losses of micro-batches are averaged "
            f"({users_line()}); pass loss_reduction='sum' to Pipeline"
        )


def joined_kwargs(kwargs: dict[str, Any], model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the model's keyword arguments: those of a call, and those that a method of a pipeline
    would take for its own.

    Raises:
        UsageError: they are no mapping, or one is given twice.
    """
    if model_kwargs is None:
        return kwargs
    if not isinstance(model_kwargs, Mapping):
        fix = "write model_kwargs={'target': …}"
        raise UsageError(
            expected("a mapping from names to values", model_kwargs, for_="model_kwargs", fix=fix)
        )
    twice = sorted(kwargs.keys() & model_kwargs.keys())
    if twice:
        raise UsageError(
            f"expected each argument of the model once, got {twice} both by name and in "
            f"model_kwargs ({users_line()}); leave it out of one"
        )
    return {**kwargs, **model_kwargs}


def check_schedule(schedule: object, chunks: int) -> None:
    """Raise :class:`ScheduleError` for a value that asks for no schedule, or for a schedule of
    another number of micro-batches."""
    names = [*SCHEDULES, "auto", "uncut"]
    if isinstance(schedule, Schedule):
        if schedule.microbatches != chunks:
            raise ScheduleError(
                f"schedule {schedule.name!r} is for {schedule.microbatches} micro-batches, but "
                f"chunks={chunks} ({users_line()}); pass chunks={schedule.microbatches}"
            )
    elif schedule not in names and not callable(schedule):
        raise ScheduleError(
            expected(
                f"one of {', '.join(map(repr, names))}, a Schedule or a callable",
                schedule,
                for_="schedule",
                fix="a callable is (lane_of_hop, microbatches) -> Schedule",
            )
        )
