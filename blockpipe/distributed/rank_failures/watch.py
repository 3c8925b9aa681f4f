"""The thread that looks after the other processes, and says that this one is alive.

A process that waits for a tensor cannot look at anything else: gloo waits outside of Python, and
cannot be interrupted. The thread therefore ends the process where its step does not end by itself.
That closes its connections, which in turn wakes those that wait for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from .board import Beat, Board, Verdict
from .progress import ProcessProgress

PERIOD = 1.0  # seconds between two signs of life
# Seconds without a sign of life after which a process counts as gone. The thread that gives it has
# to get at the interpreter and at a core, so it may be late. Where a connection was lost, somebody
# is gone, and the question is only who.
SILENT, SILENT_IF_LOST = 30.0, 5.0
# Seconds that a step has to end by itself after the verdict. A process that is to blame has fewer,
# for its end wakes those that wait for it, and they can then raise an error.
GRACE, GRACE_IF_BLAMED = 10.0, 2.0
_SHOWN = 16  # ranks in a message


class Watch:
    """Gives signs of life, and finds out which process is gone or stands still.

    The first of the processes looks after all, and the others after the first: so the store is
    asked for few texts, however many processes there are.

    Args:
        board: what the processes read of each other.
        progress: what this process is doing.
        rank: its rank.
        members: the ranks of all.
        timeout: seconds for which no process may go on, while one of them waits.

    Attributes:
        verdict: why the pipeline has failed; ``None``: it has not.
    """

    def __init__(
        self,
        board: Board,
        progress: ProcessProgress,
        rank: int,
        members: Sequence[int],
        timeout: float,
    ) -> None:
        self.verdict: Verdict | None = None
        self._board = board
        self._progress = progress
        self._rank = rank
        self._members = members
        self._timeout = timeout
        self._number = 0
        self._beats: dict[int, Beat] = {}
        self._seen: dict[int, float] = {}  # when a process last gave another sign of life
        self._moved = self._looked = time.monotonic()
        self._count, self._counted = progress.count, time.monotonic()
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blockpipe-watch", daemon=True)

    def start(self) -> None:
        """Give the first sign of life, and begin to look."""
        self._give_sign()
        self._thread.start()

    def stop(self) -> None:
        """Say that this process has no pipeline any more."""
        if os.getpid() != self._process:  # a fork, such as a worker that loads data
            return
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * PERIOD)
        try:
            self._give_sign(has_left=True)
        except Exception:  # the store may have gone before
            return

    def decide(self, verdict: Verdict) -> Verdict:
        """Set the verdict for all processes; return it, or the one that was set before."""
        try:
            self.verdict = self.verdict or self._board.decide(verdict)
        except Exception:  # the store is gone: it stays in this process
            self.verdict = verdict
        return self.verdict

    def statuses(self) -> str:
        """What all processes are doing, in lines."""
        try:
            beats = self._board.beats()
        except Exception:
            return "  unknown, for torch's store is gone"
        return _lines(beats)

    def _run(self) -> None:
        failed, since = 0, 0.0
        while not self._stopped.wait(PERIOD):
            if self.verdict is not None:
                since = since or time.monotonic()
                self._end_if_held(self.verdict, time.monotonic() - since)
                continue
            try:
                self._give_sign()
                self._look()
                failed = 0
            except Exception as error:
                failed += 1
                if failed > 1 and self._progress.is_inside:
                    self.verdict = Verdict(_no_store(error))

    def _give_sign(self, *, has_left: bool = False) -> None:
        progress, now = self._progress, time.monotonic()
        if progress.count != self._count:
            self._count, self._counted = progress.count, now
        self._number += 1
        stands_still = now - self._counted > self._timeout / 2
        self._board.set_beat(
            Beat(
                self._number,
                self._count,
                str(progress),
                progress.is_inside,
                progress.is_waiting,
                progress.is_lost,
                has_left,
                progress.stack() if stands_still and not progress.is_waiting else "",
            )
        )

    def _look(self) -> None:
        self.verdict = self._board.verdict() or self.verdict
        now = time.monotonic()
        if now - self._looked > SILENT / 3:  # the machine has slept, perhaps with all processes
            self._seen.clear()
            self._moved = now
        self._looked = now
        if self.verdict is not None:
            return
        if self._rank == self._members[0]:
            found = self._board.beats()
        else:
            found = {self._members[0]: self._board.beat(self._members[0])}
        before, self._beats = self._beats, found
        for rank, beat in found.items():
            if rank not in before or beat.number != before[rank].number:
                self._seen[rank] = now
            self._seen.setdefault(rank, now)
            if rank not in before or beat.count != before[rank].count:
                self._moved = now
        self._judge(now)

    def _judge(self, now: float) -> None:
        """Come to a verdict, if any process is gone or all stand still."""
        is_first = self._rank == self._members[0]
        every = self._beats.values()
        if not self._progress.is_inside and not (is_first and any(b.is_inside for b in every)):
            self._moved = now
            return
        is_lost = self._progress.is_lost or any(beat.is_lost for beat in every)
        limit = SILENT_IF_LOST if is_lost else SILENT
        for rank, beat in self._beats.items():
            silent = now - self._seen[rank]
            if silent > limit and not beat.has_left:
                self.decide(Verdict(self._gone(rank, beat, silent)))
            elif is_lost and beat.has_left:
                self.decide(Verdict(_left(rank)))
        if is_first and self.verdict is None and now - self._moved > self._timeout:
            self.decide(self._stall())

    def _gone(self, rank: int, beat: Beat, silent: float) -> str:
        return (
            f"rank {rank} has ended in a step without a word, or does not run (no sign of life for "
            f"{silent:.0f} s); the last one said that it {beat.status}; its own output may say "
            f"why. The ranks at that time:\n{self.statuses()}"
        )

    def _stall(self) -> Verdict:
        beats = self._beats
        computing = [r for r, b in beats.items() if b.is_inside and not b.is_waiting]
        outside = [r for r, b in beats.items() if not b.is_inside]
        blamed = computing or outside
        who = "all wait for each other"
        if blamed:
            named = ", ".join(f"rank {rank} {beats[rank].status}" for rank in blamed[:_SHOWN])
            who = f"{named}, and the others wait"
        stacks = "".join(
            f"\nrank {rank} is here:\n{beats[rank].stack}"
            for rank in blamed[:2]
            if beats[rank].stack
        )
        return Verdict(
            f"no rank went on for {self._timeout:.0f} s: {who}; if this takes so long, pass a "
            f"longer timeout=…. The ranks:\n{_lines(beats)}{stacks}",
            blamed,
        )

    def _end_if_held(self, verdict: Verdict, seconds: float) -> None:
        """End this process, if its step has not ended by itself for some seconds."""
        is_blamed = self._rank in verdict.stalled
        if seconds < (GRACE_IF_BLAMED if is_blamed else GRACE):
            return
        if not (is_blamed or self._progress.is_inside):
            return
        print(
            f"blockpipe: rank {self._rank} {self._progress}, and is ended, for the pipeline has "
            f"failed: {verdict.text}\nrank {self._rank} is here:\n{self._progress.stack()}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _lines(beats: Mapping[int, Beat]) -> str:
    shown = [f"  rank {rank} {beat.status}" for rank, beat in [*beats.items()][:_SHOWN]]
    rest = len(beats) - len(shown)
    return "\n".join([*shown, f"  and {rest} others"] if rest else shown)


def _left(rank: int) -> str:
    return (
        f"rank {rank} takes part no more, for its script has ended, or has dropped its pipeline; "
        "its own output says why, if it was an error. All ranks run the same number of steps"
    )


def _no_store(error: Exception) -> str:
    return (
        "torch's store is gone, which rank 0 keeps unless torchrun does: its process or machine "
        f"has ended in a step ({type(error).__name__}); its own output says why"
    )
