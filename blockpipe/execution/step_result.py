"""The result of a step: values without graphs, for the backward has run already."""

import copy
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from .._common.callsite import users_line
from .._common.checks import near_miss
from .._torch.modes import as_plain_tensor
from ..errors import UsageError

_SCALING = {"mul", "__mul__", "__rmul__", "div", "__truediv__", "multiply", "divide"}
_DONE = "forward_backward has run the backward already: remove this call"


class StepLoss(Tensor):
    """The loss of a step: a plain tensor, but its ``backward`` raises an error with a remedy.

    So does the loss times or divided by a number, as gradient scalers and accumulation have it.
    Other results computed from it, copies and saved files are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = as_plain_tensor(func, types, args, kwargs or {})
        is_scaled = getattr(func, "__name__", "") in _SCALING and isinstance(found, Tensor)
        if is_scaled and not found.requires_grad and not found.dim():
            return found.as_subclass(cls)
        return found

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error, unless a tensor with a graph was added to it in place."""
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
    """The result of :meth:`Pipeline.forward_backward`: values without graphs.

    ``loss`` is 0-d, on the device of the last stage; ``outputs`` is ``None`` unless asked for.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> result = pipe.forward_backward(
        ...     x, target=y, loss_fn=torch.nn.functional.mse_loss, return_outputs=True
        ... )
        >>> result.loss.shape, result.outputs.shape
        (torch.Size([]), torch.Size([8, 2]))
    """

    loss: Tensor
    outputs: Any

    def __getattr__(self, name: str) -> NoReturn:
        near, hint = near_miss(name, self._fields), ""
        if name == "backward":
            hint = f"; {_DONE}"
        elif near is not None:
            hint = f"; did you mean {near!r}?"
        elif not name.startswith("_") and hasattr(Tensor, name):
            hint = f"; the loss has it: result.loss.{name}"
        raise AttributeError(f"'StepResult' object has no attribute {name!r}{hint}")
