"""Keep parameters equal that stages in several processes share, and sum their gradients.

They are sent to the first stage's process and back, by the sends of the pipeline's own group. A
process group of the stages concerned would do the same by an all-reduce. But processes agree on the
name of such a group by the number of groups that each has made, and that number differs as soon as
another pipeline's parameters were tied between other processes: they then wait for each other for
ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .data_parallel.sparse_gradients import NONE, dense, kind_of_gradient, of_kind


@dataclass(frozen=True)
class _Entry:
    """A parameter that this process shares with others.

    Attributes:
        at: its place among all such parameters, which is the same in every process.
        parameter: this process's own.
        home: the global rank of the first stage's process.
        others: the global ranks of the other ones.
    """

    at: int
    parameter: Tensor
    home: int
    others: list[int]


class TiedParameters:
    """The parameters that stages of several processes have.

    Args:
        tied: the stages that have each such parameter, by its name.
        places: the rank of each stage.
        parameters: this process's parameters, by name.
        group: the processes; ``None`` takes all of them.
        device: the device of the tensors that are exchanged.

    Attributes:
        copies: the ids of those parameters that count on another rank.
    """

    def __init__(
        self,
        tied: Mapping[str, Sequence[int]],
        places: Sequence[int],
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._entries: list[_Entry] = []
        self._group = group
        self._device = device
        self.copies: set[int] = set()
        rank = dist.get_rank(group)
        shared = [(name, [places[stage] for stage in tied[name]]) for name in sorted(tied)]
        shared = [(name, ranks) for name, ranks in shared if len(set(ranks)) > 1]
        self._count = len(shared)
        for at, (name, ranks) in enumerate(shared):
            if rank not in ranks:
                continue
            others = [_global(group, other) for other in sorted({*ranks} - {ranks[0]})]
            entry = _Entry(at, parameters[name], _global(group, ranks[0]), others)
            self._entries.append(entry)
            if ranks[0] != rank:
                self.copies.add(id(entry.parameter))

    def broadcast(self) -> None:
        """Give every process the value that the first of the stages has."""
        for entry in self._entries:
            self._send_home_to_others(entry, entry.parameter.data)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of this process."""
        return [entry.parameter for entry in self._entries]

    def sum_gradients(self) -> None:
        """Sum the gradients over the processes; what has one nowhere stays without.

        All processes of the pipeline call it together.
        """
        if not self._count:
            return
        has = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        for entry in self._entries:
            has[entry.at] = kind_of_gradient(entry.parameter)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._group)
        kinds = has.tolist()
        for entry in self._entries:
            parameter, kind = entry.parameter, kinds[entry.at]
            if kind == NONE:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
            self._sum(entry, own)
            parameter.grad = of_kind(own, kind)

    def _sum(self, entry: _Entry, gradient: Tensor) -> None:
        given = gradient.contiguous()
        if dist.get_rank() == entry.home:
            received = torch.empty_like(given)
            for other in entry.others:
                dist.recv(received, other, group=self._group)
                given += received
        else:
            dist.send(given, entry.home, group=self._group)
        self._send_home_to_others(entry, given)
        if given is not gradient:
            gradient.copy_(given)

    def _send_home_to_others(self, entry: _Entry, tensor: Tensor) -> None:
        """Every process goes through the parameters in one order, so none waits for another one
        that waits for it."""
        given = tensor.contiguous()
        if dist.get_rank() == entry.home:
            for other in entry.others:
                dist.send(given, other, group=self._group)
            return
        dist.recv(given, entry.home, group=self._group)
        if given is not tensor:
            tensor.copy_(given)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
