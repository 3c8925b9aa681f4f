"""A batch cut off of the caller's graph, and gradients given to that.

Each micro-batch, each copy and each trial has a backward of its own, but the caller's graph behind
an input is freed by the first one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._common.nested import map_tensors


def cut_off(arguments: Any, *, leaves: bool = True) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Return arguments with a leaf in the place of each tensor that needs grad, and the pairs of
    both.

    Args:
        arguments: nested or not.
        leaves: whether this is done to leaves as well.
    """
    leaf_of: dict[int, tuple[Tensor, Tensor]] = {}

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or (tensor.is_leaf and not leaves):
            return tensor
        pair = leaf_of.setdefault(id(tensor), (tensor, tensor.detach().requires_grad_()))
        return pair[1]

    return map_tensors(cut, arguments), list(leaf_of.values())


def give(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Take gradients of inputs into the caller's graph, at once."""
    given = [(tensor, gradient) for tensor, gradient in gradients if gradient is not None]
    if given:
        torch.autograd.backward([t for t, _ in given], [g for _, g in given])
