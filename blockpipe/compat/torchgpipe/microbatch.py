"""Where a forward is, in torchgpipe's words."""

import torch
from torch import Tensor

from ..._common.thread_state import ours
from ...stages.cursor import current_cursor, is_checkpointing, is_recomputing

__all__ = ["current_microbatch", "is_checkpointing", "is_recomputing"]

_KEY = "torchgpipe.current_microbatch"


def current_microbatch() -> Tensor | None:
    """A tensor that stands for the micro-batch whose forward is under way.

    It is the same object throughout that forward, and another one in every other. Its values mean
    nothing: it is the key of a dictionary, or what a weak reference refers to.

    Returns:
        An empty tensor on the CPU; ``None`` outside of a pipeline.

    Source: ``torchgpipe.current_microbatch``. :func:`blockpipe.current_microbatch` gives the index.

    Example:
        >>> from blockpipe.compat.torchgpipe import current_microbatch
        >>> print(current_microbatch())
        None
    """
    cursor = current_cursor()
    if cursor is None:
        return None
    if _KEY not in cursor.kept:
        with ours():
            cursor.kept[_KEY] = torch.empty(0, device="cpu")
    key: Tensor = cursor.kept[_KEY]
    cursor.tell_apart(key)
    return key
