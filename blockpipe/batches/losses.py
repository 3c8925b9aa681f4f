"""A micro-batch's loss: the user's function of the output, or the model's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._common.callsite import users_line, warn
from .._common.code import code_of
from .._common.nested import tensors
from ..errors import UsageError
from ..stages.cursor import passing_marks


def loss_of(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Tensor:
    """Return the loss of an output.

    Args:
        output: the model's output.
        target: the second argument of ``loss_fn``; ``None``: it gets the output alone.
        loss_fn: the user's function; ``None``: the model's own loss counts.

    Raises:
        UsageError: the loss is not a tensor of one element.
    """
    return checked_loss(computed_loss(output, target, loss_fn))


def computed_loss(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Any:
    """Return the loss of the user's code, unchecked; the arguments are those of :func:`loss_of`."""
    if loss_fn is None:
        return own_loss(output)
    with passing_marks():
        return loss_fn(output) if target is None else loss_fn(output, target)


def checked_loss(loss: Any) -> Tensor:
    """Return the loss.

    Raises:
        UsageError: it is not a tensor of one element, or a complex one.
    """
    if isinstance(loss, Tensor) and loss.is_complex():
        raise UsageError(
            f"expected a real number for the loss, got one of {loss.dtype} ({users_line()}); "
            "reduce it to a real one, as by loss.abs() or loss.real"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, Tensor)
        what = f"one of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
        raise UsageError(
            f"expected a tensor with one element for the loss, got {what} ({users_line()}); pass a "
            "loss_fn= that reduces to one number, or let the model return its loss (a 0-d tensor, "
            "a `loss` field or key; in a tuple or list, its 0-d first element or its only 0-d one "
            "that is floating-point and requires grad)"
        )
    return loss


@dataclass(frozen=True)
class WeightedLoss:
    """A loss function whose result counts for a part of the batch's.

    Args:
        loss_fn: the user's; ``None``: the model's own loss counts.
        weight: the part.
    """

    loss_fn: Callable[..., Any] | None
    weight: float

    def __call__(self, output: Any, target: Any = None) -> Any:
        """Return the loss, weighted."""
        return computed_loss(output, target, self.loss_fn) * self.weight


def own_loss(output: Any) -> Any:
    """Return the loss that a model's output has: itself, a field or key, a first element that is
    0-d, or the only 0-d floating-point tensor (PopTorch's ``return out, loss``). A tensor without a
    gradient path, such as an accuracy, is none where another one has a path.

    Raises:
        UsageError: it has none, or a tensor that may as well be the output of one sample.
    """
    loss = own_loss_or_none(output)
    if loss is None:
        has_keys = isinstance(output, Mapping)
        remedy = "return it under the key 'loss', " if has_keys else ""
        raise UsageError(
            f"the model returned {type(output).__name__} without a loss ({users_line()}); {remedy}"
            "pass loss_fn=…, or labels so that the model computes its own"
        )
    if loss is output and loss.dim() and loss.numel() == 1:
        raise UsageError(
            "expected a 0-d tensor for the model's own loss, got one of shape "
            f"{tuple(loss.shape)}, which may be the output of one sample ({users_line()}); pass "
            "loss_fn=…, or return loss.squeeze() if it is the loss"
        )
    return loss


def own_loss_or_none(output: Any) -> Any:
    """Return the loss as :func:`own_loss` does; ``None``: the output has none."""
    if isinstance(output, Tensor):
        return output  # its caller checks that it has one element
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, tuple | list):  # before Mapping, an abstract class, which is slow to ask
        numbers = [t for t in output if isinstance(t, Tensor) and t.dim() == 0]
        losses = [t for t in numbers if t.is_floating_point()]
        losses = [t for t in losses if t.requires_grad] or losses
        is_clear = bool(losses) and (len(losses) == 1 or losses[0] is output[0])
        return losses[0] if is_clear else None
    return output.get("loss") if isinstance(output, Mapping) else None


def own_or_mean_square(output: Any, target: Any = None) -> Tensor:
    """Return the model's own loss, or the mean square of its output if it has none."""
    loss = own_loss_or_none(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = [t for t in tensors(output) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise UsageError(
            f"expected an output with a gradient path for the backward, got none ({users_line()}); "
            "call it under torch.no_grad() for the forward alone, or pass loss_fn=…"
        )
    return torch.stack([t.float().square().mean() for t in found]).sum()


def check_differentiable(loss: Tensor) -> None:
    """Raise :class:`UsageError` for a loss at which no backward can begin."""
    if not loss.requires_grad:
        raise UsageError(
            "expected a loss with a gradient path for forward_backward, got one that does not "
            f"require grad ({users_line()}); leave a parameter trainable and no_grad off, or call "
            "the pipeline itself for a forward alone"
        )


def warn_of_some_without_a_number(losses: Sequence[Tensor]) -> None:
    """Warn if the losses of some micro-batches, but not of all, are NaN."""
    without = [m for m, loss in enumerate(losses) if bool(loss.isnan().any())]
    if 0 < len(without) < len(losses):
        warn(
            f"the loss of micro-batch {', '.join(map(str, without))} of {len(losses)} is not a "
            f"number (NaN), and so is the batch's ({users_line()}); if all of its labels are "
            "ignored (-100), so that it is the mean of nothing, pass loss_reduction= a function "
            "(args, kwargs, target) -> the number of labels that count: where it is 0, the "
            "micro-batch is left out"
        )


def kind_of(loss_fn: Any) -> Any:
    """Return the code of a loss function, and whether it is in training mode: it stays the same if
    each step defines it anew."""
    while isinstance(loss_fn, WeightedLoss):
        loss_fn = loss_fn.loss_fn
    return code_of(loss_fn), getattr(loss_fn, "training", None)
