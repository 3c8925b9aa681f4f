"""List the parameters and buffers of a model that is recorded."""

from __future__ import annotations

from torch import nn

from ..._common.modules import named_slots
from ..._common.text import dtype_text
from ..._torch.modules import buffers_of, parameters_of
from ...costs.work import size_of
from ..entries import TensorInfo
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
