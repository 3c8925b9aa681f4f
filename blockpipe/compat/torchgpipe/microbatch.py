"""The forward under way, in torchgpipe's words: its micro-batch, and whether it is recomputed."""

import torch
from torch import Tensor

from ..._common.threads.thread_state import ours
from ...stages.cursor import current_cursor, is_checkpointing, is_recomputing

__all__ = ["current_microbatch", "is_checkpointing", "is_recomputing"]

_KEY = "torchgpipe.current_microbatch"


def current_microbatch() -> Tensor | None:
    """Return a tensor that identifies the micro-batch whose forward is under way.

    It is the same object throughout that forward, and another one in every other. Its values mean
    nothing: it is for the keys of dictionaries, and for weak references.

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
