"""The outputs of one micro-batch, kept apart from what the model goes on with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._common.nested import map_tensors
from ...recording.plain_values.arrays import is_array


def apart(outputs: Any, size: int, *, overwritten: bool) -> Any:
    """Return outputs with copies of what the model may have for the next micro-batch as well.

    Args:
        outputs: of one micro-batch.
        size: the number of its samples.
        overwritten: whether the forward writes to the memory of a tensor that it returns.
    """
    outputs = _with_own_containers(outputs)
    return map_tensors(lambda t: _copied(t, size), outputs) if overwritten else outputs


def _with_own_containers(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)([_with_own_containers(item) for item in value])
    if type(value) is dict:
        return {key: _with_own_containers(item) for key, item in value.items()}
    return value.copy() if is_array(value) else value


def _copied(tensor: Tensor, size: int) -> Tensor:
    """Return a copy of a tensor that has the samples; others may be weights."""
    return tensor.clone() if size in tensor.shape else tensor
