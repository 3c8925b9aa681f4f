"""What a step returns: values without graphs, for the backward has been done."""

import copy
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from .._common.callsite import users_line
from .._torch.modes import as_plain_tensor
from ..errors import UsageError

_DONE = "forward_backward has done the backward already: leave this call out"


class StepLoss(Tensor):
    """The loss of a step: a plain tensor in all that it is used for, but for its ``backward``.

    What is computed from it, copied or saved is a plain tensor.
    """

    __torch_function__ = as_plain_tensor  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused, unless something was added in place that has a graph."""
        if not self.requires_grad:
            raise UsageError(
                f"a step's loss has no graph, for {_DONE} ({users_line()}); scale a loss in "
                "loss_fn=…, or call pipe(x) for a graph of your own"
            )
        self._plain().backward(*args, **kwargs)

    def _plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._plain(), memo)


class StepResult(NamedTuple):
    """What :meth:`Pipeline.forward_backward` returns: values without graphs.

    ``loss`` is 0-d, on the device of the last stage; ``outputs`` is ``None`` unless asked for.
    """

    loss: Tensor
    outputs: Any

    @property
    def backward(self) -> NoReturn:
        """There is none: it has been done."""
        raise AttributeError(f"'StepResult' object has no attribute 'backward'; {_DONE}")
