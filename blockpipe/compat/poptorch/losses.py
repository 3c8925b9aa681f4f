"""The loss of a training call: how a model marks it, and what a call returns of it."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..._common.callsite import users_line
from ..._common.nested import tensors
from ...batches.losses import own_loss
from ...errors import UsageError
from ...execution.step_result import StepLoss

_IS_LOSS = "_is_poptorch_loss"


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark a tensor as the loss, among several numbers that a forward returns.

    Args:
        x: the loss, before its reduction.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one element.

    Returns:
        The loss, 0-d unless ``"none"``; the forward must return it.

    Raises:
        UsageError: there is no such reduction, or it is ``"none"`` for several elements.

    Source: ``poptorch.identity_loss``.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> poptorch.identity_loss(torch.tensor([1.0, 3.0]), reduction="mean")
        tensor(2.)
    """
    if reduction not in ("mean", "sum", "none") or (reduction == "none" and x.numel() != 1):
        raise UsageError(
            f"expected reduction='mean' or 'sum', got {reduction!r} for a loss of shape "
            f"{tuple(x.shape)} ({users_line()}); 'none' is for a loss of one element"
        )
    loss = x if reduction == "none" else getattr(x, reduction)()
    setattr(loss, _IS_LOSS, True)
    return loss


def loss_of(output: Any) -> Any:
    """Return the loss that a model's output marks by :func:`identity_loss`, or its own one.

    Raises:
        UsageError: it has several that are marked, and none of them is computed from the others.
    """
    marked: dict[int, Tensor] = {}
    for member in output if type(output) is tuple else (output,):
        # Each micro-batch asks: most members are tensors, and need no search.
        for tensor in (member,) if isinstance(member, Tensor) else tensors(member):
            if getattr(tensor, _IS_LOSS, False):
                marked[id(tensor)] = tensor
    if not marked:
        return own_loss(output)
    final = [one for one in marked.values() if _is_computed_from(one, marked.values())]
    if len(final) != 1:
        raise UsageError(
            "expected one final loss among those that identity_loss marks and the forward returns, "
            f"got {len(marked)} of which none is computed from the others ({users_line()}); add "
            "them up, and mark the sum"
        )
    return final[0]


def _is_computed_from(loss: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether all of some tensors, or the loss itself, lie on the way to a loss."""
    wanted = {tensor.grad_fn for tensor in others if tensor is not loss}
    seen: set[object] = set()
    left = [loss.grad_fn] if wanted else []
    while left and not wanted <= seen:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [inner for inner, _ in node.next_functions]
    return wanted <= seen


class CallLoss(StepLoss):
    """A number that a training call returns: its ``backward`` raises an error with a remedy."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error, as a call of a training model has run the backward."""
        if self.requires_grad:  # a tensor with a graph was added in place
            return super().backward(*args, **kwargs)
        raise UsageError(
            "expected no backward after a call of a training model, got one of a number that it "
            f"returned ({users_line()}): the call has run it, and the optimizer's step; remove "
            "this call, and those of zero_grad() and step()"
        )


def without_backward(tensor: Tensor) -> Tensor:
    """Return a tensor of a training call's result whose ``backward`` says that it has run."""
    is_number = tensor.dim() == 0 and tensor.is_floating_point()
    return tensor.as_subclass(CallLoss) if is_number else tensor
