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
        for tensor, _ in away:
            move_data(tensor, "cpu")
        yield
    finally:
        for tensor, data in away:
            _set_data(tensor, data)


def move_data(tensor: Tensor, device: torch.device | str) -> None:
    """Move a parameter, buffer or gradient to a device.

    Args:
        tensor: the tensor; it stays the same object, and one that is trained may move in inference
            mode too.
        device: the device.
    """
    with torch.inference_mode(tensor.is_inference()):
        _set_data(tensor, tensor.data.to(device))


def _set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data
    if tensor.requires_grad:
        renew_hooks_of_several(tensor)
