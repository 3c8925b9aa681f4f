"""Report a failure in the middle of a step to the processes that wait for a tensor of it.

A process whose neighbour has ended only sees a closed connection or a timeout. So the process that
failed leaves a report in the store through which torch's processes found each other, and the others
look there. While nothing fails, there is no thread and nothing is sent.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .._common.callsite import users_line
from .._torch.processes import shared_store
from ..errors import RankError

_PATIENCE = 5.0  # seconds that others have to leave a report once a connection is lost
_POLL = 0.1  # seconds
# Parts of the messages of gloo, NCCL and the store about a process that is gone or late.
_LOST = ("connection", "timed out", "timeout", "peer", "gloo", "nccl", "socket")


class Failures:
    """The reports of the processes of one pipeline.

    Args:
        group: the processes; ``None`` takes all of them.
        device: the device of the tensors that are exchanged.

    Attributes:
        began: whether the step under way has sent anything.
    """

    began = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        number = torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(time.time_ns()))
        number = number.to(device)
        dist.broadcast(number, 0 if group is None else dist.get_global_rank(group, 0), group=group)
        self._prefix = f"blockpipe/{number.item()}"

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around what processes do together: a failure in here reaches all of them.

        Raises:
            BaseException: this process's own failure, with a note.
            RankError: another process failed, ended or hangs.
        """
        self.began = False
        try:
            yield
        except Exception as error:
            if not self.began:
                raise  # all processes have agreed on it, and can go on
            if not _is_lost(error):
                error.add_note(f"blockpipe: on rank {self._rank}; the other ranks end as well")
                self._report("".join(traceback.format_exception(_root(error))))
                raise
            raise RankError(self._explained(error)) from error
        except BaseException as error:  # an interrupt: others should not wait for this process
            self._report(f"{type(error).__name__}")
            raise

    def _report(self, text: str) -> None:
        try:
            shared_store().set(f"{self._prefix}/{self._rank}", text)
        except Exception:  # the store may be gone with its process: the failure itself counts
            return

    def _explained(self, error: Exception) -> str:
        """Say which process failed, and how; or, if none has said so, which are silent."""
        self._report("")
        ends = time.monotonic() + _PATIENCE
        reports: dict[int, str] = {}
        try:
            while len(reports) < self._ranks and time.monotonic() < ends:
                for rank in range(self._ranks):
                    key = f"{self._prefix}/{rank}"
                    if rank not in reports and shared_store().check([key]):
                        reports[rank] = shared_store().get(key).decode(errors="replace")
                        if reports[rank]:
                            return (
                                f"rank {rank} failed in a step ({users_line()}):\n{reports[rank]}"
                            )
                time.sleep(_POLL)
        except Exception:
            return (
                f"expected rank 0 to keep torch's store, got none ({users_line()}): it has ended "
                "in a step; its own output says why"
            )
        silent = [rank for rank in range(self._ranks) if rank not in reports]
        which = f"rank {silent[0]}" if len(silent) == 1 else f"one of the ranks {silent}"
        return (
            f"expected all ranks to go on, but {which} has ended in a step without a word, or "
            f"hangs ({users_line()}): {str(error).splitlines()[-1]}; its own output may say why, "
            "and init_process_group(timeout=…) says how long a rank is waited for"
        )


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_lost(error: BaseException) -> bool:
    """Whether an error is of the connection to another process, and of no code of this one."""
    root = _root(error)
    if isinstance(root, dist.DistError):
        return True
    is_torchs = type(root) is RuntimeError and not getattr(root, "__notes__", None)
    return is_torchs and any(word in str(root).lower() for word in _LOST)
