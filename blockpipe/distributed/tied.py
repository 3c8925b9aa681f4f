"""Keep parameters equal that stages in several processes share, and sum their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class TiedParameters:
    """The parameters that stages of several processes have.

    Args:
        tied: the stages that have each such parameter, by its name.
        places: the rank of each stage.
        parameters: this process's parameters, by name.
        group: the processes; ``None`` takes all of them.
    """

    def __init__(
        self,
        tied: Mapping[str, Sequence[int]],
        places: Sequence[int],
        parameters: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._entries: list[tuple[Tensor, dist.ProcessGroup | None, int]] = []
        self.copies: set[int] = set()  # ids of parameters that count on another rank
        rank = dist.get_rank(group)
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, stages in tied.items():
            members = tuple(sorted({places[stage] for stage in stages}))
            if len(members) < 2 or rank not in members:
                continue
            ranks = [_global(group, member) for member in members]
            if members not in groups:
                made = dist.new_group(ranks, use_local_synchronization=True)
                assert not isinstance(made, int)  # it stands for no member
                groups[members] = made
            home = places[stages[0]]
            self._entries.append((parameters[name], groups[members], _global(group, home)))
            if home != rank:
                self.copies.add(id(parameters[name]))

    def broadcast(self) -> None:
        """Give every process the value that the first of the stages has."""
        for parameter, group, home in self._entries:
            dist.broadcast(parameter.data, home, group=group)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of this process."""
        return [parameter for parameter, _, _ in self._entries]

    def sum_gradients(self) -> None:
        """Sum the gradients over the processes."""
        for parameter, group, _ in self._entries:
            has_any = torch.tensor(
                [parameter.grad is not None], dtype=torch.int32, device=parameter.device
            )
            dist.all_reduce(has_any, group=group)
            if has_any.item():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
