"""Keep the replicas of a stage equal, which run in other processes on shares of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._common.checks import expected
from .._torch.graph import stepping_hooks
from .._torch.tensors import bytes_of
from ..errors import UsageError
from .data_parallel.sparse_gradients import NONE, SPARSE, dense, kind_of_gradient, of_kind

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
            value = tensor.data.contiguous()
            first = dist.get_global_rank(self._group, 0)
            dist.broadcast(bytes_of(value), first, group=self._group)
            if not tensor.is_contiguous():
                tensor.data.copy_(value)

    @property
    def count(self) -> int:
        """The number of replicas."""
        return dist.get_world_size(self._group)

    def shared(self, value: Any, number: int = 0) -> Any:
        """Return the object that one replica's process has, in all."""
        given = [value]
        home = dist.get_global_rank(self._group, number)
        dist.broadcast_object_list(given, home, group=self._group)
        return given[0]

    def each(self, value: Any) -> Iterator[Any]:
        """Yield every replica's object, one after the other, in the processes of all."""
        for number in range(self.count):
            yield self.shared(value, number)

    def check_loss(self, loss_fn: object) -> None:
        """Raise :class:`UsageError` for a loss with trained parameters, whose gradients nobody
        would sum."""
        owner = getattr(loss_fn, "func", loss_fn)  # of a partial
        owner = getattr(owner, "__self__", owner)  # of a method
        if self.count == 1 or not isinstance(owner, nn.Module):
            return
        for name, parameter in owner.named_parameters():
            if parameter.requires_grad:
                what = "a loss without trained parameters, for only those of the model are summed"
                got = f"{type(owner).__name__} with {name!r}"
                fix = "make the loss a submodule, and have the model's forward return it"
                raise UsageError(expected(f"{what} over processes", got, for_="loss_fn", fix=fix))

    def check_hooks(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise :class:`UsageError` for a parameter that a hook of its own may step."""
        for name, parameter in parameters if self.count > 1 else ():
            if stepping_hooks(parameter):
                what = "no hook of register_post_accumulate_grad_hook, which would be given the"
                what += " gradient of this process's share,"
                fix = "step after forward_backward"
                raise UsageError(expected(what, "one", for_=f"parameter {name!r}", fix=fix))

    def total(self, number: float, device: torch.device) -> float:
        """Sum a number over the replicas."""
        found = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(found, group=self._group)
        return found.item()

    def agree(self, number: int, *, failed: bool, device: torch.device) -> tuple[bool, bool]:
        """Return whether something has failed in any replica, and whether all have one number."""
        found = torch.tensor([failed, number, -number], dtype=torch.int64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        any_failed, largest, smallest = found.tolist()
        return bool(any_failed), largest == -smallest

    def begin_sum(self, parameters: Sequence[Tensor], device: torch.device) -> PendingSum:
        """Begin to sum gradients over the replicas, in buckets; in the same order in each.

        Args:
            parameters: whose; a parameter without a gradient counts as zero.
            device: where they are.
        """
        kinds = torch.tensor([kind_of_gradient(p) for p in parameters], dtype=torch.int32)
        pending = PendingSum([*parameters], kinds.to(device))
        pending.begin(self._group)
        return pending


class PendingSum:
    """A sum of gradients that is under way.

    Args:
        parameters: whose gradients are summed.
        kinds: for each, the kind of its gradient.
    """

    def __init__(self, parameters: list[Tensor], kinds: Tensor) -> None:
        self._kinds = kinds
        self._parameters = parameters
        self._buckets: list[tuple[list[Tensor], Tensor]] = []
        self._works: list[Any] = []

    def begin(self, group: dist.ProcessGroup) -> None:
        """Send what is there; nothing is waited for."""
        maximum = dist.ReduceOp.MAX
        self._works.append(dist.all_reduce(self._kinds, maximum, group=group, async_op=True))
        for bucket in _buckets(self._parameters):
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket])
            self._works.append(dist.all_reduce(flat, group=group, async_op=True))
            self._buckets.append((bucket, flat))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sums, and put them into ``.grad``; what has one nowhere stays without."""
        for work in self._works:
            work.wait()
        pairs = zip(self._parameters, self._kinds.tolist(), strict=True)
        kinds = {id(parameter): kind for parameter, kind in pairs}
        for bucket, flat in self._buckets:
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, summed in zip(bucket, flat.split(sizes), strict=True):
                kind = kinds[id(parameter)]
                if kind == NONE:
                    continue
                found = summed.view_as(parameter)
                if kind == SPARSE:
                    parameter.grad = of_kind(found, kind)
                    continue
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(found)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one dtype each, of at most :data:`_BUCKET` bytes or a single one."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(parameter)
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
