"""A micro-batch's loss: the user's function of the output, or the model's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._common.callsite import users_line, warn
from .._common.nested import tensors
from ..errors import UsageError


def loss_of(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Tensor:
    """The loss of an output.

    Args:
        output: the model's.
        target: given to ``loss_fn`` after it, if there is one.
        loss_fn: ``None``: the model's own loss counts.

    Raises:
        UsageError: it is no tensor of one element.
    """
    return checked_loss(computed_loss(output, target, loss_fn))


def computed_loss(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Any:
    """What the user's code gives for a loss, whatever it is; arguments as for :func:`loss_of`."""
    if loss_fn is None:
        return own_loss(output)
    return loss_fn(output) if target is None else loss_fn(output, target)


def checked_loss(loss: Any) -> Tensor:
    """A loss that is one.

    Raises:
        UsageError: it is no tensor of one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"a loss is a tensor with one element, but {what} came; pass loss_fn=…, "
            "with a reduction to one number, or let the model return its loss (a 0-d tensor, a "
            "`loss` field or key, a 0-d first element, or the only 0-d floating-point one)"
        )
    return loss


def own_loss(output: Any) -> Any:
    """The loss that a model's output has: itself, a field or key, a first element that is 0-d, or
    the only one that is a 0-d floating-point tensor (PopTorch's ``return out, loss``).

    Raises:
        UsageError: it has none.
    """
    loss = own_loss_or_none(output)
    if loss is None:
        raise UsageError(
            f"the model returned {type(output).__name__} without a loss ({users_line()}); pass "
            "loss_fn=…, or labels so that the model computes its own"
        )
    return loss


def own_loss_or_none(output: Any) -> Any:
    """As :func:`own_loss`; ``None`` where it has none."""
    if isinstance(output, Tensor):
        return output  # its caller says what is wrong if it has more than one element
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list):
        numbers = [t for t in output if isinstance(t, Tensor) and t.dim() == 0]
        losses = [t for t in numbers if t.is_floating_point()]
        if numbers and numbers[0] is output[0]:
            loss = output[0]
        elif len(losses) == 1:
            loss = losses[0]
    return loss


def own_or_mean_square(output: Any, target: Any = None) -> Tensor:
    """The model's own loss; the mean square of what it returns if it has none."""
    loss = own_loss_or_none(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = [t for t in tensors(output) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise UsageError(
            f"a backward needs an output with a gradient path, but none came ({users_line()}); "
            "call it under torch.no_grad() for the forward alone, or pass loss_fn=…"
        )
    return torch.stack([t.float().square().mean() for t in found]).sum()


def check_differentiable(loss: Tensor) -> None:
    """Raise :class:`UsageError` for a loss that no backward can begin at."""
    if not loss.requires_grad:
        raise UsageError(
            "forward_backward needs a loss with a gradient path, but this loss does not "
            "require grad: are all parameters frozen, or is this called under no_grad? "
            "For a forward alone call the pipeline itself"
        )


def warn_of_some_without_a_number(losses: Sequence[Tensor]) -> None:
    """Warn where the losses of some micro-batches, and not of all, are not a number."""
    without = [m for m, loss in enumerate(losses) if bool(loss.isnan().any())]
    if 0 < len(without) < len(losses):
        warn(
            f"the loss of micro-batch {', '.join(map(str, without))} of {len(losses)} is not a "
            f"number (NaN), and so is the batch's ({users_line()}); are all of its labels ignored "
            "(-100), so that a mean was taken over nothing? Then give loss_reduction= a function, "
            "(args, kwargs, target) -> how many labels count: where that is 0 nothing is added"
        )


def kind_of(loss_fn: Any) -> Any:
    """What stays the same where a loss function is written anew for each step: its code."""
    loss_fn = getattr(loss_fn, "func", loss_fn)
    return getattr(loss_fn, "__code__", (type(loss_fn), getattr(loss_fn, "training", None)))
