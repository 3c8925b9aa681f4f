"""Optimizers that step in the backward, by hooks on parameters.

In a plain loop over micro-batches such a hook steps once for each of them, and the next one runs
with other values. Here several are under way at once, so that they would run with values of no one
moment, and torch notices only where a backward has saved the parameter.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._common.callsite import users_line
from .._torch.graph import stepping_hooks
from .._torch.tensors import version_of
from ..errors import StateError


@contextmanager
def no_early_steps(parameters: Iterable[Tensor], count: int) -> Iterator[None]:
    """While entered, a hook that writes to its parameter before the last micro-batch's gradient is
    there is an error.

    Args:
        parameters: those that a step may give gradients.
        count: the number of micro-batches.

    Raises:
        StateError: in the backward, behind such a hook.
    """
    watched = [p for p in parameters if stepping_hooks(p) and p.is_leaf and p.requires_grad]
    where = users_line() if watched else ""
    handles = [handle for p in watched for handle in _watch(p, count, where)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(parameter: Tensor, count: int, where: str) -> list[RemovableHandle]:
    version, calls = 0, 0

    def before(_: Tensor) -> None:
        nonlocal version, calls
        version, calls = version_of(parameter), calls + 1

    def after(_: Tensor) -> None:
        if calls < count and version_of(parameter) != version:
            raise StateError(
                f"a hook writes to a parameter of shape {tuple(parameter.shape)} after the "
                f"gradient of micro-batch {calls} of {count}, while others are under way "
                f"({where}): their gradients would be of no one model; step after the pipeline's "
                "step, or in the hook when the last micro-batch's gradient is there, or use "
                "schedule='sequential'"
            )

    first = parameter.register_post_accumulate_grad_hook(before)
    hooks = stepping_hooks(parameter)
    assert hooks is not None
    theirs = {key: hook for key, hook in hooks.items() if key != first.id}
    for key in theirs:
        del hooks[key]
    hooks.update(theirs)  # behind the first one
    return [first, parameter.register_post_accumulate_grad_hook(after)]
