"""A process's part of the model and of its optimizer, as ``torch.distributed.checkpoint`` saves it.

Everything is under the names that the model has for its parameters, and not under numbers, which
would be those of one process's stages: so a checkpoint does not know how many stages there were.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..stage_values import StageValues

# By the name of each parameter, also what torch keeps by groups of parameters: a process has a part
# of each group.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedState:
    """The state of this process's stages; a ``Stateful`` of ``torch.distributed.checkpoint``.

    Args:
        model: the user's.
        values: those of this process's stages.
        optimizer: of their parameters; ``None``: the model's state alone.
    """

    def __init__(self, model: nn.Module, values: StageValues, optimizer: Optimizer | None) -> None:
        self._model = model
        self._values = values
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part: ``"model"``, and ``"optimizer"`` if there is one."""
        found: dict[str, Any] = {"model": self._values.own()}
        if self._optimizer is not None:
            found["optimizer"] = get_optimizer_state_dict(
                self._model, self._optimizer, options=_BY_NAME
            )
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this process's part, as :meth:`state_dict` returns it."""
        self._values.load_own(state["model"])
        if self._optimizer is not None:
            set_optimizer_state_dict(
                self._model,
                self._optimizer,
                optim_state_dict=state["optimizer"],
                options=_BY_NAME,
            )
