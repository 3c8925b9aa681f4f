"""Where to cut a model into stages: found from its recording, for any model that can be recorded.

The forward is recorded as one stage. It can be cut where a module call begins a segment, and stages
are the stretches between cuts. The cost of every such stretch is known, so a dynamic program finds
the best choice exactly. A heuristic would not be shorter, and libraries that balance a list of
layers (torchgpipe, DeepSpeed) need the model to be one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._common.callsite import remembers_caller
from .._common.checks import expected
from .._common.hints import knows_other_names
from .._common.threads.model_turns import alone_with
from ..batches.step_arguments import StepArguments
from ..devices.devices import Devices, is_asynchronous, is_on_meta, named_devices
from ..errors import UsageError
from ..preparation.hop_costs import rates_of_stages
from ..preparation.memory.model import copies_of
from ..preparation.options import check_loss, check_schedule
from ..preparation.schedule_choice import lanes_of
from ..recording.record import record
from ..schedules.builders import ScheduleOption
from ..stages.plan import StagePlan
from ..weights.module_interface import ModuleInterface
from .balanced_plan import UNITS, BalancedPlan
from .checked_numbers import check_count, checked_number
from .conditions import (
    Conditions,
    checked_limits,
    checked_speeds,
    link_between,
    modules_named,
    stage_devices,
)
from .search import CutSearch
from .search_report import balanced_plan
from .timing.segment_timing import SegmentTimer, TimingOptions


@remembers_caller
@knows_other_names(
    microbatches="pass chunks=",
    n_stages="pass stages=",
    num_stages="pass stages=",
    sample="pass args=, the forward's arguments",
)
def balance(
    model: nn.Module,
    args: Any = (),
    stages: int = 2,
    by: str = "time",
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    chunks: int = 8,
    schedule: ScheduleOption = "1f1b",
    devices: Devices = None,
    speeds: Sequence[float] | None = None,
    limits: Sequence[int] | int | None = None,
    optimizer: object = None,
    first: float = 0.0,
    last: float = 0.0,
    slack: float = 0.05,
    at: str | Sequence[str] | None = None,
    bandwidth: float | None = None,
    measure: bool = True,
    repeats: int = 5,
    training: bool = True,
) -> BalancedPlan:
    """Cut a model into stages so that the costliest one costs as little as possible, to 5 %.

    Marks in the model do not count, and stay; the model is left as it was. Of choices that are as
    good to ``slack``, the one that moves the fewest bytes between stages is taken, and of these the
    one at the outermost modules: mostly at whole layers. The model is then recorded once more with
    its stages, so that a pipeline can carry out the plan that is returned.

    Args:
        model: the model; for ``by="time"`` with values, or times are estimated.
        args: positional arguments of *one micro-batch*; a single tensor needs no tuple.
        stages: the number of stages.
        by: the quantity to balance: ``"time"`` of a micro-batch's forward and backward;
            ``"memory"``, the peak in bytes; ``"parameters"``, their bytes, where shared ones count
            for the first stage that reads them; ``"flops"`` of a forward.
        kwargs: keyword arguments of one micro-batch.
        target: the second argument of ``loss_fn``.
        loss_fn: a loss that is measured at the end of the last stage, as
            :meth:`Pipeline.forward_backward` runs it. ``None`` takes the model's own loss; if it
            returns none, the backward begins at its outputs.
        chunks: the number of micro-batches of a step.
        schedule: the schedule of the steps, which the number of micro-batches in flight and the
            predicted time follow from.
        devices: a device for each stage; times are measured on the first. ``None`` takes the device
            that the model is on, and for each further stage the next accelerator, if it is on one.
        speeds: the speeds of the stages' devices, relative to the one where times are measured (2
            is twice as fast). ``None`` takes all to be equal.
        limits: the bytes that each stage may need at its peak: one number, or one for each stage.
        optimizer: the optimizer, whose state counts for the memory, as for
            :meth:`Pipeline.memory`.
        first: a cost of the first stage beside the model's, in the unit of ``by`` (seconds, bytes,
            floating-point operations).
        last: such a cost of the last stage.
        slack: the share by which the costliest stage may cost more than it must, where fewer bytes
            cross then, or a stage begins with a larger module. With 0 the optimum is returned, even
            if it is in the middle of a layer.
        at: path patterns such as ``"blocks.*"``, as for :func:`begin_blocks`, of the modules that
            stages may begin with. ``None`` allows any.
        bandwidth: bytes per second between devices. ``None`` times copies between the first two
            devices that differ; on one device, and on the CPU, a crossing costs nothing.
        measure: for ``by="time"``, whether the micro-batch is run and timed. Otherwise, and on the
            meta device, times are estimated from the recorded work by rates that are measured on
            the device.
        repeats: how often the micro-batch is run; medians count.
        training: whether there is a backward; ``False`` means a forward alone, under ``no_grad``.

    Memory is counted as :meth:`Pipeline.memory` counts it, except for the memory that
    ``checkpoint=`` and ``offload=`` save, and for the gradients that schedules with a backward in
    two parts keep.

    Returns:
        A :class:`BalancedPlan`. Printed, it is a table; its :meth:`~BalancedPlan.marks` are lines
        to paste.

    Raises:
        PlanError: the model cannot be cut into so many stages; no choice keeps to the limits (the
            error says which stage exceeds its limit, and by how much); a number is out of range.
        UsageError: ``by`` or the optimizer is unknown; there is no gradient to begin a backward at.
        MarkError: a pattern in ``at`` names no module.
        RecordingError: the forward does not run on the arguments.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> plan = bp.balance(net, torch.zeros(4, 8), 3, by="parameters")
        >>> print(plan.marks())
        model[2] = bp.BeginBlock(model[2], stage=1)
        model[4] = bp.BeginBlock(model[4], stage=2)
        >>> bp.record(net, torch.zeros(4, 8), plan=plan).route
        [0, 1, 2]
    """
    if not isinstance(kwargs, Mapping | None):
        raise UsageError(expected("a mapping from names to values", kwargs, for_="kwargs"))
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    sample = StepArguments(args, dict(kwargs or {}), target, loss_fn)
    _check(model, by, sample)
    check_schedule(schedule, check_count("chunks", chunks))
    devices = named_devices(devices)
    places = stage_devices(model, devices, check_count("stages", stages))
    conditions = Conditions(
        stages=stages,
        by=by,
        chunks=chunks,
        schedule=schedule,
        devices=places,
        lanes=lanes_of(places, devices or places),
        speeds=checked_speeds(speeds, by, stages),
        limits=checked_limits(limits, stages),
        copies=copies_of(optimizer),
        extra=(checked_number("first", first), checked_number("last", last)),
        slack=checked_number("slack", slack),
        link=link_between(places, bandwidth),
        training=training,
        at=modules_named(model, at),
    )
    return _balanced(model, sample, conditions, check_count("repeats", repeats), measure)


def _balanced(
    model: nn.Module, sample: StepArguments, conditions: Conditions, repeats: int, measure: bool
) -> BalancedPlan:
    """Record the model as one stage, take the times of its segments, and search."""
    places, training = conditions.devices, conditions.training
    # The steps of other threads, too, put doors on the modules.
    with alone_with(model), torch.set_grad_enabled(training):
        recording = record(model, sample.args, sample.kwargs, plan=StagePlan([]), intended=places)
        search = CutSearch(model, sample, recording, conditions)
        is_serial = is_asynchronous(places[0]) or search.costs.one_thread
        lanes = 1 if is_serial else len(set(conditions.lanes))
        if measure and conditions.by == "time" and not is_on_meta(model):
            options = TimingOptions(
                device=places[0],
                threads=max(1, torch.get_num_threads() // lanes),
                lanes=lanes,
                repeats=repeats,
                training=training,
            )
            timer = SegmentTimer(model, recording, search.open, sample, options)
            search.use_measured(timer.measure())
        else:
            search.estimate_times(rates_of_stages(places, lanes)[0])
        return balanced_plan(search, *search.run())


def _check(model: object, by: object, sample: StepArguments) -> None:
    if isinstance(model, ModuleInterface):
        raise UsageError(expected("the model itself", model, for_="model", fix="pass its .module"))
    if by not in tuple(UNITS):
        raise UsageError(expected(f"one of {', '.join(map(repr, UNITS))}", by, for_="by"))
    check_loss(sample.loss_fn, sample.target)
