"""Hooks of ``register_post_accumulate_grad_hook``, which may step the parameters of a stage.

A plain loop calls them after each micro-batch's backward, before the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._torch.graph import stepping_hooks
from ..._torch.tensors import version_of
from ...errors import StateError, UsageError


class HookedSteps:
    """Sees to it that no hook changes parameters that a forward has read, before its backward.

    Args:
        parameters: of a stage.

    Attributes:
        waiting: how many forwards of the stage have run whose backwards have not.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [*parameters]
        self._versions = self._present()
        self.waiting = 0

    def after_backward(self) -> None:
        """A backward is over, with its hooks.

        Raises:
            StateError: they have changed a parameter, and another forward read it before.
        """
        self.waiting -= 1
        before, self._versions = self._versions, self._present()
        if self.waiting and before != self._versions:
            raise StateError(
                "expected hooks of register_post_accumulate_grad_hook that leave parameters alone "
                f"until the last micro-batch, got one that steps ({users_line()}) while the "
                "forwards of later micro-batches have run; step after forward_backward"
            )

    def _present(self) -> list[int]:
        return [version_of(parameter) for parameter in self._parameters]


def hooked_steps(stage: nn.Module, *, in_order: bool) -> HookedSteps | None:
    """Return what watches the hooks on a stage's parameters; ``None``: it has none.

    Args:
        stage: the module.
        in_order: whether its backwards run as a whole, those of earlier micro-batches first.

    Raises:
        UsageError: they do not, so that hooks would not be called as in a plain loop.
    """
    found = [*stage.named_parameters()]
    hooked = [name for name, parameter in found if stepping_hooks(parameter)]
    if not hooked:
        return None
    if not in_order:
        raise UsageError(
            "expected no hooks of register_post_accumulate_grad_hook under a schedule that splits "
            "backwards or runs them in another order than a plain loop, got one on parameter "
            f"{hooked[0]!r} ({users_line()}); change .grad after forward_backward, or use "
            "schedule='1f1b' or 'interleaved'"
        )
    return HookedSteps(parameter for _, parameter in found)
