"""Operators that users write in Python, by ``torch.library.custom_op``."""

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS

from .tensors import OpOverload

_TORCHS = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "mkldnn")


def body_of(func: Any) -> Callable[..., Any] | None:
    """Return the function that computes an operation; ``None`` if it is none of such an operator.
    On fake tensors another one runs in its place, which tells their shapes."""
    if not isinstance(func, OpOverload) or func.namespace in _TORCHS:
        return None
    found = OPDEFS.get(func._schema.name)
    return None if found is None else found._init_fn
