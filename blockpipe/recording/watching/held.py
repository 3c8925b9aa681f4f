"""List the parameters and buffers of a model that is recorded, and say which hops read them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..._common.modules import named_slots
from ..._common.text import dtype_text
from ..._torch.modules import buffers_of, parameters_of
from ...costs.work import size_of
from ..entries import TensorInfo
from ..outside.outside_tensors import OutsideTensors
from ..recording import Recording


def held_tensors(model: nn.Module, result: Recording) -> dict[int, TensorInfo]:
    """Write down every parameter and buffer, tied ones once.

    Args:
        model: the model that is recorded.
        result: the recording that they are added to.

    Returns:
        The same entries, by the id of the tensor.
    """
    found: dict[int, TensorInfo] = {}
    for is_buffer, slots in ((False, parameters_of), (True, buffers_of)):
        for name, tensor in named_slots(model, slots):
            held = found.get(id(tensor))
            if held is not None:
                held.names.append(name)
                continue
            held = TensorInfo(
                [name],
                tuple(tensor.shape),
                dtype_text(tensor.dtype),
                size_of(tensor),
                tensor.numel(),
                tensor.requires_grad,
                is_buffer,
            )
            found[id(tensor)] = held
            (result.buffers if is_buffer else result.parameters).append(held)
    return found


def hops_reading(
    held: Mapping[int, TensorInfo], outside: OutsideTensors, tensor: Tensor
) -> set[int]:
    """Return the hops that read a tensor.

    Args:
        held: the parameters and buffers, by id.
        outside: the tensors that no module registered.
        tensor: the tensor.
    """
    found = held.get(id(tensor))
    return {*outside.hops_of(tensor), *(() if found is None else found.hops)}
