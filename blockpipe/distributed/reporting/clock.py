"""One clock for all processes: that of the first one.

Processes of one machine have one clock. The clocks of two machines are apart by any time: a process
asks the first one what time it is, and takes the answer for the middle of the time that the
question took, as NTP does; of several tries the fastest counts.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

_TRIES = 8


def offset_to_first(group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Return the nanoseconds to add to this process's ``perf_counter_ns``; all call it together."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = 0
    machines = [""] * ranks
    dist.all_gather_object(machines, _machine(), group=group)
    for other in range(1, ranks):
        if machines[other] and machines[other] == machines[0]:
            continue
        if rank == 0:
            for _ in range(_TRIES):
                dist.recv(_time(0, device), _global(group, other), group=group)
                dist.send(_time(time.perf_counter_ns(), device), _global(group, other), group=group)
        elif rank == other:
            tries = [_asked(group, device) for _ in range(_TRIES)]
            _, found = min(tries)
    return found


def _machine() -> str:
    """What tells a machine, since it was started, from all others; ``""``: nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _asked(group: dist.ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """How long the question took, and how far the first process's clock is ahead."""
    began, answer = time.perf_counter_ns(), _time(0, device)
    dist.send(answer, _global(group, 0), group=group)
    dist.recv(answer, _global(group, 0), group=group)
    theirs = int(answer.item())
    over = time.perf_counter_ns()
    return over - began, theirs - (began + over) // 2


def _time(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
