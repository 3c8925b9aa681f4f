"""Functions of torch that call one of the user's, in which a mode that handles them is off.

What such a function reads through its closure is the forward's as much as the code around it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import triplet_margin_with_distance_loss
from torch.overrides import TorchFunctionMode

from .._common.threads.thread_state import enter_modes, leave_modes

CALLS_BACK: frozenset[Callable[..., Any]] = frozenset(
    [triplet_margin_with_distance_loss, Tensor.apply_, Tensor.map_, Tensor.map2_]
)
"""Those that hide it. Others call it where the mode is on."""


def seen_by(
    mode: TorchFunctionMode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of such a function with its callables under a mode."""
    called = tuple(_under(mode, one) for one in args)
    return called, {name: _under(mode, one) for name, one in kwargs.items()}


def _under(mode: TorchFunctionMode, value: Any) -> Any:
    if not callable(value) or isinstance(value, Tensor):
        return value

    def called(*args: Any, **kwargs: Any) -> Any:
        enter_modes([mode])
        try:
            return value(*args, **kwargs)
        finally:
            leave_modes()

    return called
