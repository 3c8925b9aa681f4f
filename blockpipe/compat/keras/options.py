"""IPU Keras' pipelining options as those of a ``Pipeline``."""

from collections.abc import Sequence
from typing import Any

from ..._common.callsite import users_line
from ..._common.checks import expected, is_integer
from ...devices.devices import default_devices
from ...errors import PlanError, UsageError

_SCHEDULES = {"Grouped": "1f1b", "Interleaved": "1f1b", "Sequential": "sequential"}
_REDUCTIONS = ("sum", "mean")
_REFUSED = {
    "batch_serialization_iterations": "a stage runs once for each micro-batch; pass a larger "
    "gradient_accumulation_steps_per_replica",
    "gradient_accumulation_count": "pass gradient_accumulation_steps_per_replica",
    "gradient_accumulation_steps": "pass gradient_accumulation_steps_per_replica",
    "recomputation_mode": "pass checkpoint='except_last' to Pipeline for recomputation",
    "repeat_count": "the training loop is yours: write it around forward_backward",
}


def pipelining_options(
    gradient_accumulation_steps_per_replica: int = 1,
    device_mapping: Sequence[int] | None = None,
    gradient_accumulation_reduction_method: str = "sum",
    *,
    pipeline_schedule: Any = "Grouped",
    offload_activations: bool = False,
    **pipelining: Any,
) -> dict[str, Any]:
    """Translate the arguments of Keras' ``set_pipelining_options`` into those of ``Pipeline``.

    Args:
        gradient_accumulation_steps_per_replica: the micro-batches of a step.
        device_mapping: the device of each stage, as its number among the machine's accelerators;
            stages that share weights need not share a device. On a machine without accelerators
            each number is a thread. ``None``: one device for each stage.
        gradient_accumulation_reduction_method: ``"sum"`` of the micro-batches' gradients, or
            ``"mean"``; an enumeration's member counts by its name.
        pipeline_schedule: ``"Grouped"`` or ``"Interleaved"``, which are both 1F1B here, or
            ``"Sequential"``; an enumeration's member counts by its name.
        offload_activations: whether activations are in host memory between forward and backward.
        **pipelining: nothing else has a meaning here.

    Returns:
        Keyword arguments of :class:`~blockpipe.Pipeline`.

    Raises:
        PlanError: a number, list or word that is none of these; a device that does not exist.
        UsageError: another argument.

    Source: ``set_pipelining_options`` of IPU Keras' models, whose reduction is ``"sum"`` too.

    Example:
        >>> from blockpipe.compat import keras
        >>> options = keras.pipelining_options(8, gradient_accumulation_reduction_method="mean")
        >>> options["chunks"], options["schedule"], options["loss_reduction"]
        (8, '1f1b', 'mean')
    """
    for name in pipelining:
        fix = _REFUSED.get(name, "see the page on coming from Keras")
        raise UsageError(
            f"pipelining_options() got an argument {name!r} that has no meaning here "
            f"({users_line()}); {fix}"
        )
    steps = gradient_accumulation_steps_per_replica
    if not is_integer(steps, 1):
        name = "gradient_accumulation_steps_per_replica"
        raise PlanError(expected("a positive integer", steps, for_=name))
    method = _word(gradient_accumulation_reduction_method).lower()
    if method not in _REDUCTIONS:
        name = "gradient_accumulation_reduction_method"
        raise PlanError(expected(f"one of {_REDUCTIONS}", method, for_=name))
    schedule = _word(pipeline_schedule).capitalize()
    if schedule not in _SCHEDULES:
        raise PlanError(expected(f"one of {tuple(_SCHEDULES)}", schedule, for_="pipeline_schedule"))
    options: dict[str, Any] = {
        "chunks": steps,
        "schedule": _SCHEDULES[schedule],
        "loss_reduction": method,
        "offload": offload_activations,
    }
    if device_mapping is not None:
        options["devices"] = _mapped(device_mapping)
    return options


def _word(value: Any) -> str:
    """Return a word, or the name of an enumeration's member."""
    return str(getattr(value, "name", value))


def _mapped(numbers: Sequence[int]) -> list[Any]:
    if not isinstance(numbers, list | tuple) or not all(is_integer(n, 0) for n in numbers):
        contract = "a list of integers from 0 on"
        raise PlanError(expected(contract, numbers, for_="device_mapping"))
    devices = default_devices()
    if devices is None:  # on the CPU a number is a thread
        return [f"cpu:{number}" for number in numbers]
    if max(numbers, default=0) >= len(devices):
        contract = f"numbers of the machine's {len(devices)} devices"
        raise PlanError(expected(contract, list(numbers), for_="device_mapping"))
    return [devices[number] for number in numbers]
