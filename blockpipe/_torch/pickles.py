"""Pickles of tensors. What Blockpipe notes on a tensor is for the process that it is in."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def leave_out(prefix: str) -> None:
    """Have no attributes of tensors in pickles whose names begin so: ``torch.load`` takes no
    objects of other classes, and a file is to be what it is without a pipeline.

    Args:
        prefix: the beginning.
    """
    state_of: Callable[[Any], Any] = torch._utils._get_obj_state

    @functools.wraps(state_of)
    def without(value: Any) -> Any:
        state = state_of(value)
        is_own = isinstance(value, Tensor) and type(state) is dict
        if not is_own or not any(str(name).startswith(prefix) for name in state):
            return state
        return {name: one for name, one in state.items() if not str(name).startswith(prefix)}

    torch._utils._get_obj_state = without
