"""Failures in the middle of a step: who failed, told to those who wait for a tensor of it.

A process whose neighbour has ended hears only that a connection is closed, or that time is up, and
one whose neighbour hangs hears nothing. The process that failed therefore leaves a verdict where
all look, and each gives signs of life.
"""

from __future__ import annotations

import secrets
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..._common.callsite import users_line
from ...errors import RankError
from .board import Board, Verdict
from .progress import ProcessProgress
from .watch import PERIOD, SILENT_IF_LOST, Watch

# Seconds that the verdict is waited for, once a connection is lost.
_PATIENCE = SILENT_IF_LOST + 10 * PERIOD


class Failures:
    """Sees to it that a failure of one process is an error of all.

    Args:
        groups: the processes of the pipeline, and the replicas of this one, if there are any;
            ``None`` among them: all.
        members: the global ranks of all processes of all replicas.
        device: where tensors for them are.
        timeout: seconds for which no process may go on, while one of them waits.

    Attributes:
        progress: what this process is doing.
        is_agreed: whether the processes have agreed on what is under way: an error from before is
            one of all of them, and they can go on.
        began: whether anything has been sent since.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup | None],
        members: Sequence[int],
        device: torch.device,
        timeout: float,
    ) -> None:
        self.progress = ProcessProgress()
        self.is_agreed = self.began = False
        self._rank = dist.get_rank()
        number = torch.tensor(secrets.randbits(62), device=device)
        for group in reversed(groups):  # the first replica's number; then that of its first process
            first = 0 if group is None else dist.get_global_rank(group, 0)
            dist.broadcast(number, first, group=group)
        board = Board(f"blockpipe/{number.item()}", self._rank, members)
        self._watch = Watch(board, self.progress, self._rank, members, timeout)
        self._watch.start()
        self.close = weakref.finalize(self, self._watch.stop)

    @contextmanager
    def told(self, *, agreed: bool = False) -> Iterator[None]:
        """Around what processes do together: a failure in here reaches all of them.

        Args:
            agreed: whether nothing is to be agreed on.

        Raises:
            BaseException: this process's own failure, with a note.
            RankError: another process failed, ended or hangs.
        """
        if self._watch.verdict is not None:
            raise RankError(_explained(self._watch.verdict))
        self.is_agreed = self.began = agreed
        progress = self.progress
        progress.failure, progress.is_lost = None, False
        with progress.inside():
            try:
                yield
            except Exception as error:
                if self.is_agreed and not self.began:
                    raise
                failure = progress.failure
                if failure is None or root_of(failure) is not root_of(error):
                    raise RankError(self._lost(error)) from error
                error.add_note(f"blockpipe: on rank {self._rank}; the other ranks end as well")
                self._report(error)
                raise
            except BaseException as error:  # an interrupt: others should not wait for this process
                self._report(error)
                raise

    def _report(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(root_of(error)))
        self._watch.decide(Verdict(f"rank {self._rank} failed in a step:\n{text}"))

    def _lost(self, error: Exception) -> str:
        """Say which process failed, and how: or, if none has, what went wrong here."""
        progress = self.progress
        status = str(progress)
        progress.is_lost = True
        ends = time.monotonic() + _PATIENCE
        while self._watch.verdict is None and time.monotonic() < ends:
            time.sleep(PERIOD / 10)
        verdict = self._watch.verdict
        if verdict is None:
            said = "".join(traceback.format_exception(root_of(error)))
            verdict = self._watch.decide(
                Verdict(
                    f"rank {self._rank} failed in a step, and {status}:\n{said}"
                    f"The ranks:\n{self._watch.statuses()}"
                )
            )
        return _explained(verdict)


def _explained(verdict: Verdict) -> str:
    return f"expected all ranks to go on ({users_line()}): {verdict.text}"


def root_of(error: BaseException) -> BaseException:
    """Return the error that an error comes from in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
