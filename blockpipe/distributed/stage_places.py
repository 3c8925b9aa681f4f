"""The rank of each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._torch.tensors import bytes_of


class StagePlaces:
    """The ranks of the stages of one pipeline.

    Args:
        ranks: the rank in the group of each stage, in the order of the chain.
        group: the processes; ``None`` takes all of them.

    Attributes:
        own: the stages of this process.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.group = group
        self.own = [stage for stage in range(len(ranks)) if self.is_own(stage)]

    def is_own(self, stage: int) -> bool:
        """Return whether a stage is in this process."""
        return self.ranks[stage] == dist.get_rank(self.group)

    def shared(self, value: Any, stage: int) -> Any:
        """Return the object that the process of one stage has, in all."""
        given = [value]
        dist.broadcast_object_list(given, self._global(stage), group=self.group)
        return given[0]

    def broadcast(self, tensor: Tensor, stage: int) -> None:
        """Send a contiguous tensor from the process of one stage to all; ``-1`` is the last one."""
        dist.broadcast(bytes_of(tensor), self._global(stage), group=self.group)

    def _global(self, stage: int) -> int:
        home = self.ranks[stage]
        return home if self.group is None else dist.get_global_rank(self.group, home)
