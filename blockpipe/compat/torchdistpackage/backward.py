"""A user's function for the backward of a stage, within the backward of a pipeline.

The function is called as ``bwd_fn(output, gradient)``, or ``bwd_fn(loss, None)``, and runs a
backward itself. Here the pipeline does that. So the function is given a leaf with the output's
values, and what it leaves in the leaf's ``.grad`` is handed on: a scaled loss, a changed gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._common.callsite import users_line
from ..._common.checks import expected
from ...errors import UsageError
from .ranks import as_rank

Backward = Callable[[Any, Any], object]


def through(output: Any, function: Backward, rank: int | None, *, is_loss: bool) -> Any:
    """Return the output of a stage, whose backward is the user's function.

    Args:
        output: a tensor, or a list or tuple of tensors.
        function: the user's.
        rank: the rank that it is called as.
        is_loss: whether the output is the loss, which has no gradient from a later stage.
    """
    several = isinstance(output, tuple | list)
    given = tuple(output) if several else (output,)
    if not all(isinstance(one, Tensor) for one in given):
        contract = "a tensor, or a list of tensors, from a fwd_fn with a bwd_fn"
        raise UsageError(expected(contract, output))
    call = _Call(function, rank, is_loss, several)
    result = _UsersBackward.apply(call, *given)
    return type(output)(result) if several else result[0]


class _Call:
    """How the user's function is called."""

    def __init__(self, function: Backward, rank: int | None, is_loss: bool, several: bool) -> None:
        self.function, self.rank, self.is_loss, self.several = function, rank, is_loss, several

    def __call__(self, values: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> list[Any]:
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in values]
        output: Any = leaves if self.several else leaves[0]
        given: Any = list(gradients) if self.several else gradients[0]
        with as_rank(self.rank), torch.enable_grad():
            self.function(output, None if self.is_loss else given)
        if not any(leaf.grad is not None for leaf in leaves):
            raise UsageError(
                "expected bwd_fn to run a backward of the output that it is given, got no gradient "
                f"({users_line()}); call output.backward(gradient), or pass None for that"
            )
        if self.is_loss:  # whose share in the step is the gradient of the pipeline's own
            return [None if leaf.grad is None else leaf.grad * gradients[0] for leaf in leaves]
        return [leaf.grad for leaf in leaves]


class _UsersBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*values)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.call(ctx.saved_tensors, gradients)
