"""Keep the replicas of a stage equal, which run in other processes on shares of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._common.checks import expected
from ..errors import UsageError

_BUCKET = 25 * 2**20  # bytes, as DistributedDataParallel has it


class StageReplicas:
    """The processes that have the same stages, each with its share of the batch.

    Args:
        group: the processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this process is of the first replica."""
        return self.number == 0

    @property
    def number(self) -> int:
        """The number of this process's replica."""
        return dist.get_rank(self._group)

    def broadcast(self, held: Iterable[Tensor]) -> None:
        """Give every replica the first one's values."""
        for tensor in held:
            dist.broadcast(tensor.data, dist.get_global_rank(self._group, 0), group=self._group)

    def total(self, number: float, device: torch.device) -> float:
        """Sum a number over the replicas."""
        found = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(found, group=self._group)
        return found.item()

    def sum_gradients(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        """Sum gradients over the replicas, in buckets; a parameter without any stays so."""
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        has = has.to(device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        for parameter, any_has in zip(parameters, has.tolist(), strict=True):
            if any_has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=self._group)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, summed in zip(bucket, flat.split(sizes), strict=True):
                gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype each, of at most :data:`_BUCKET` bytes or a single one."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        if bucket:
            yield bucket


def processes_of(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, list[int]]:
    """Return the processes of a pipeline, those that have the same stages, and the ranks of all.

    Raises:
        UsageError: the mesh does not have two dims, or a group was passed with it.
    """
    if mesh is None:
        return group, None, dist.get_process_group_ranks(group)
    if mesh.ndim != 2 or group is not None:
        what = "a mesh of two dims and no group"
        fix = "make it by init_device_mesh(kind, (replicas, processes of a pipeline))"
        raise UsageError(expected(what, f"{mesh.ndim} dims", for_="mesh", fix=fix))
    return mesh.get_group(1), mesh.get_group(0), sorted(mesh.mesh.flatten().tolist())
