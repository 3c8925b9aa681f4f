"""The tensors of a model that is spread over devices, together on the host for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._torch.graph import renew_hooks_of_several


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have the parameters, gradients and buffers of a model that is spread over devices on the
    host while entered, as before its placement. A model on one device stays there.

    Args:
        model: the model, such as a copy of one that a pipeline has placed.
    """
    held = [*model.parameters(), *model.buffers()]
    is_spread = len({tensor.device for tensor in held}) > 1
    held += [tensor.grad for tensor in held if tensor.grad is not None]
    away = [(t, t.data) for t in held if is_spread and t.device.type not in ("cpu", "meta")]
    try:
        for tensor, data in away:
            set_data(tensor, data.to("cpu"))
        yield
    finally:
        for tensor, data in away:
            set_data(tensor, data)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a parameter or buffer other data, which may be on another device.

    Args:
        tensor: the tensor; it stays the same object.
        data: the data. A tensor that is none of inference mode becomes none by it.
    """
    with torch.inference_mode(tensor.is_inference()):
        tensor.data = data
        if tensor.requires_grad:
            renew_hooks_of_several(tensor)
