"""The functions of ``torch.distributed`` that such scripts call, for the ranks of one process."""

from torch import Tensor

from .ranks import current_rank, current_ranks
from .topology import tpc

__all__ = ["barrier", "broadcast", "get_rank", "get_world_size"]


def broadcast(tensor: Tensor, src: int = 0, group: str | None = "pipe") -> None:
    """Write one rank's tensor into those of the others; outside of a launch there are no others.

    Args:
        tensor: of any shape, the same on every rank.
        src: the rank that has it.
        group: ``tpc.get_group("pipe")``; a group with one rank leaves the tensor as it is.

    Source: ``torch.distributed.broadcast``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import dist, launch
        >>> def main():
        ...     tensor = torch.tensor(float(dist.get_rank()))
        ...     dist.broadcast(tensor, 1)
        ...     return tensor.item()
        >>> launch(main, 2)
        [1.0, 1.0]
    """
    ranks = current_ranks()
    if ranks is not None and (group is None or tpc.get_group_size(group) > 1):
        source = ranks.meet("dist.broadcast", tensor, lambda tensors: tensors[src].clone())
        tensor.data.copy_(source)


def barrier(group: str | None = "pipe") -> None:
    """Wait for the other ranks of ``group``.

    Example:
        >>> from blockpipe.compat.torchdistpackage import dist
        >>> dist.barrier()
    """
    ranks = current_ranks()
    if ranks is not None and (group is None or tpc.get_group_size(group) > 1):
        ranks.meet("dist.barrier", None, lambda _: None)


def get_rank(group: str | None = None) -> int:
    """Return the rank that runs here; outside of a launch it is 0.

    Args:
        group: any; the rank is that in the launch.

    Example:
        >>> from blockpipe.compat.torchdistpackage import dist
        >>> dist.get_rank()
        0
    """
    return current_rank() or 0


def get_world_size(group: str | None = None) -> int:
    """Return the number of ranks; outside of a launch it is 1.

    Args:
        group: any; the ranks are those of the launch.

    Example:
        >>> from blockpipe.compat.torchdistpackage import dist
        >>> dist.get_world_size()
        1
    """
    ranks = current_ranks()
    return 1 if ranks is None else ranks.size
