"""Losses that torch averages by class weights, and not over samples.

``nn.CrossEntropyLoss(weight=w)`` divides by the sum of its targets' weights. The means of the
micro-batches make up the batch's if each of them counts as much as its own sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import users_line, warn
from .._torch.modules import forward_hooks_of, forward_pre_hooks_of
from .losses import WeightedLoss
from .microbatch import LossReduction


def reduction_for(loss_fn: Callable[..., Any] | None, given: LossReduction) -> LossReduction:
    """Return how the losses of micro-batches make up the batch's.

    Args:
        loss_fn: the user's loss function; ``None``: the model's own loss counts.
        given: the user's ``loss_reduction``.

    Example:
        >>> import torch
        >>> by_class = reduction_for(torch.nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])), "mean")
        >>> by_class((), {}, torch.tensor([1, 0, 1, -100]))
        tensor(7.)
        >>> reduction_for(torch.nn.CrossEntropyLoss(), "mean")
        'mean'
    """
    if given != "mean":
        return given
    if isinstance(loss_fn, WeightedLoss):
        loss_fn = loss_fn.loss_fn
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        return given
    torchs = nn.CrossEntropyLoss if isinstance(loss_fn, nn.CrossEntropyLoss) else nn.NLLLoss
    # A forward of its own may average otherwise.
    if getattr(loss_fn.forward, "__func__", None) is not torchs.forward:
        return given
    if loss_fn.weight is None or loss_fn.reduction != "mean":
        return given
    if forward_pre_hooks_of(loss_fn) or forward_hooks_of(loss_fn):
        warn(
            f"loss_fn, a {type(loss_fn).__name__} with class weights, has a forward hook: "
            "micro-batches count by the weights of their targets as they are given "
            f"({users_line()}); if the hook changes targets or the loss, pass loss_reduction= a "
            "function (args, kwargs, target) -> what the loss is a mean over"
        )
    return _SumOfWeights(loss_fn.weight, loss_fn.ignore_index)


@dataclass(frozen=True)
class _SumOfWeights:
    """What the mean of a micro-batch is taken over: the weights of its targets' classes.

    Args:
        weight: of each class.
        ignored: the target that does not count.
    """

    weight: Tensor
    ignored: int

    def __call__(self, args: Any, kwargs: Any, target: Any) -> Any:
        """Return the number, as ``loss_reduction`` does."""
        if not isinstance(target, Tensor) or target.is_floating_point():  # probabilities of classes
            return len(target)
        # The loss function refuses a class that is not there, and in better words.
        counts = (target != self.ignored) & (target >= 0) & (target < len(self.weight))
        with torch.no_grad():
            return self.weight.to(target.device)[target[counts]].sum()
