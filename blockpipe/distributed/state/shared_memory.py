"""Refuse stages of several processes that share memory: each process has a copy of it, and what one
changes the others do not see."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...errors import StateError
from ...preparation.shared_state import Info, named, of_one_memory
from ...recording.entries import TensorInfo
from ...recording.recording import Recording


def check_memory(model: nn.Module, recording: Recording, ranks: Sequence[int]) -> None:
    """Raise :class:`StateError` for a tensor that is trained or written in one process, and that
    shares memory with another one which a stage in another process reads.

    Args:
        model: the user's.
        recording: of its forward.
        ranks: the rank of each hop.
    """
    if len({*ranks}) == 1:
        return
    for together in of_one_memory(model, recording):
        for changing in filter(_changes, together):
            here = {ranks[hop] for hop in changing.hops}
            for other in together:
                there = {ranks[hop] for hop in other.hops} - here
                if other is not changing and there:
                    raise StateError(
                        f"expected stages that share no memory, got {named(changing)}, which "
                        f"changes on rank {min(here)} ({changing.where}), in one memory with "
                        f"{named(other)}, which is read on rank {min(there)} ({other.where}); each "
                        "process has a copy. Register one parameter or buffer under both names, "
                        "keep both on one stage, or give one of them a memory of its own "
                        "(tensor.clone())"
                    )


def _changes(info: Info) -> bool:
    return info.written or (isinstance(info, TensorInfo) and info.trainable)
