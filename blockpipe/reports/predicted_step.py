"""The prediction of one step: its schedule played out by the recording's costs, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..devices.devices import is_asynchronous
from ..preparation.memory.model import predict
from ..preparation.memory.report import MemoryReport
from ..preparation.prepared import Prepared
from ..schedules.builders import ScheduleOption
from ..schedules.simulation import Simulation, simulate


@dataclass(frozen=True)
class PredictedStep:
    """The prediction of a step.

    Attributes:
        simulation: the schedule played out.
        recompute_seconds: for each hop, the time of making a micro-batch's activations again.
        memory: the memory of each stage.
        is_inline: whether one thread runs the micro-batches, one after the other.
    """

    simulation: Simulation
    recompute_seconds: list[float]
    memory: MemoryReport
    is_inline: bool


def predict_step(
    prepared: Prepared, option: ScheduleOption, microbatches: int, *, optimizer: object = None
) -> PredictedStep:
    """Predict a step.

    Args:
        prepared: the model as it is prepared for the step.
        option: the schedule that is asked for; ``"uncut"`` is predicted as ``"sequential"``.
        microbatches: the number of micro-batches.
        optimizer: the optimizer whose state counts, as for :meth:`Pipeline.memory`.

    Raises:
        ScheduleError: the user's own schedule does not fit.
    """
    costs = prepared.costs
    played_option = option_played(prepared, option, microbatches)
    assert isinstance(costs.recompute, list)
    return PredictedStep(
        simulate(prepared.schedule(played_option, microbatches), costs),
        costs.recompute,
        predict(prepared, played_option, microbatches, optimizer=optimizer),
        prepared.runs_inline(option, microbatches),
    )


def option_played(prepared: Prepared, option: ScheduleOption, microbatches: int) -> ScheduleOption:
    """Return the option whose schedule a step has: in one thread micro-batches go one by one."""
    return "sequential" if prepared.runs_inline(option, microbatches) else option


def smallest_memory(devices: Sequence[torch.device]) -> int | None:
    """Return the bytes of the accelerator with the least memory; ``None`` if all are CPUs."""
    accelerators = {device for device in devices if is_asynchronous(device)}
    return min((torch.accelerator.get_memory_info(d)[1] for d in accelerators), default=None)
