"""The ranks of a pipeline in one process, for scripts that ask which rank they are.

Such a script is written for processes that all run it, each with other answers to ``if
is_first_in_pipeline_group()``. Here each rank is a thread that runs it, and one of them works at a
time: they hand on the turn where processes would communicate. So there is no race in the script,
and what it draws at random depends on no timing. In a step all stages work at once, as ever.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected, is_integer
from ..._common.threads.shared_contexts import SharedContexts
from ..._common.threads.thread_state import CallerState
from ...errors import PlanError, UsageError

R = TypeVar("R")


class _StoppedError(BaseException):
    """Another rank has failed."""


class _Meeting:
    """One call that all ranks make.

    Args:
        name: the function's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: dict[int, Any] = {}
        self.result: Any = None


class Ranks:
    """The ranks that run a script, and whose turn it is.

    Args:
        size: how many they are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._working = list(range(size))
        self._turn = 0
        self._meeting: _Meeting | None = None
        self.failure: BaseException | None = None

    def meet(self, name: str, given: Any, together: Callable[[list[Any]], R]) -> R:
        """Wait until every rank has called this; return the result for all of them.

        Args:
            name: the function that the script calls, for errors.
            given: what this rank gives.
            together: makes the result, of what the ranks gave, in their order. The last rank that
                comes calls it.

        Raises:
            UsageError: the ranks do not all call the same.
        """
        rank = _rank.get()
        assert rank is not None
        meeting = self._meeting or _Meeting(name)
        if meeting.name != name:
            others = ", ".join(map(str, meeting.given))
            raise UsageError(
                f"expected every rank to call {meeting.name}, as rank {others} does, got {name} by "
                f"rank {rank} ({users_line()}); call it on every rank, not under an if"
            )
        self._meeting = meeting
        meeting.given[rank] = given
        if len(meeting.given) == self.size:
            self._meeting = None
            meeting.result = together([meeting.given[rank] for rank in range(self.size)])
        self._hand_on(rank)
        self.wait(rank)
        if len(meeting.given) < self.size:
            gone = sorted({*range(self.size)} - meeting.given.keys())
            raise UsageError(
                f"expected every rank to call {name}, got the end of the script by rank "
                f"{', '.join(map(str, gone))} ({users_line()}); call it on every rank"
            )
        result: R = meeting.result
        return result

    def wait(self, rank: int) -> None:
        """Wait for this rank's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self.failure is not None)
            if self.failure is not None:
                raise _StoppedError

    def leave(self, rank: int, failure: BaseException | None) -> None:
        """End a rank's work."""
        with self._changed:
            if self.failure is None and not isinstance(failure, _StoppedError):
                self.failure = failure
        self._hand_on(rank)
        self._working.remove(rank)

    def _hand_on(self, rank: int) -> None:
        with self._changed:
            at = self._working.index(rank)
            self._turn = self._working[(at + 1) % len(self._working)]
            self._changed.notify_all()


_rank: ContextVar[int | None] = ContextVar("blockpipe_rank", default=None)
_ranks: ContextVar[Ranks | None] = ContextVar("blockpipe_ranks", default=None)


def current_rank() -> int | None:
    """Return the rank that runs here; ``None``: the process is all of them."""
    return _rank.get()


def current_ranks() -> Ranks | None:
    """Return the ranks that run the script; ``None``: no :func:`launch` does."""
    return _ranks.get()


@contextmanager
def as_rank(rank: int | None) -> Iterator[None]:
    """While entered, be another rank: in its forward, or in its backward."""
    token = _rank.set(rank)
    try:
        yield
    finally:
        _rank.reset(token)


@remembers_caller
def launch(main: Callable[[], R], stages: int) -> list[R]:
    """Run a script that is written for several processes in this one, once for each rank.

    It stands for ``torchrun``. Each rank has variables, a part of the model and an optimizer of its
    own. One rank works at a time, until it comes to a function that needs the others:
    :func:`forward_backward`, :func:`forward_eval`, :func:`clip_grad_norm_`, ``dist.broadcast`` or
    ``dist.barrier``. Then the next rank has its turn. The stages of a step run at once.

    Args:
        main: the script, as a function.
        stages: the number of ranks: each is a stage.

    Returns:
        What ``main`` returned, for each rank.

    Raises:
        PlanError: the number is not a positive integer.
        UsageError: the ranks do not all call the same functions.
        The first exception of any rank, after which the others stop.

    Source: torchdistpackage's scripts, which ``torchrun`` or Slurm starts.

    Example:
        >>> from blockpipe.compat.torchdistpackage import launch, tpc
        >>> launch(lambda: (tpc.get_group_rank("pipe"), tpc.is_last_in_pipeline_group()), 2)
        [(0, False), (1, True)]
    """
    if not is_integer(stages, 1):
        raise PlanError(expected("a positive integer", stages, for_="stages"))
    if _ranks.get() is not None:
        raise UsageError(
            f"launch() was called by a rank of another one ({users_line()}); call main()"
        )
    ranks, results = Ranks(stages), dict[int, R]()
    caller = CallerState().for_threads()

    def work(rank: int) -> None:
        failure: BaseException | None = None
        _ranks.set(ranks)
        _rank.set(rank)
        try:
            ranks.wait(rank)
            results[rank] = main()
        except BaseException as error:  # raised again where the user waits
            failure = error
        ranks.leave(rank, failure)

    threads = [
        threading.Thread(
            target=caller.run, args=(lambda rank=rank: work(rank),), name=f"rank {rank}"
        )
        for rank in range(stages)
    ]
    with SharedContexts():
        _run(threads, ranks)
    if ranks.failure is not None:
        raise ranks.failure
    return [results[rank] for rank in range(stages)]


def _run(threads: Sequence[threading.Thread], ranks: Ranks) -> None:
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # the ranks end at their next meeting
        ranks.failure = ranks.failure or interrupt
        raise
