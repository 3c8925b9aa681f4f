"""What several processes run together where one of them fails: each needs a launch of its own."""

import os
import signal
import time

from blockpipe._torch.processes import shared_store

from .cases import failing


def _raise() -> None:
    raise ValueError("no luck")


def raises(rank: int, ranks: int) -> None:
    """The failing one has its own error, the others one that quotes it."""
    if rank < ranks - 1:
        failing(
            *(rank, ranks, _raise, f"rank {ranks - 1} failed in a step", "ValueError: no luck"),
            *("failing_cases.py", f"in stage {ranks - 1}, micro-batch 2"),
        )
        return
    try:
        failing(rank, ranks, _raise)
    except RuntimeError as error:
        cause = error.__cause__
        assert isinstance(cause, ValueError)
        assert f"blockpipe: in stage {rank}, micro-batch 2" in cause.__notes__
        assert any(f"on rank {rank}" in note for note in error.__notes__)


def dies(rank: int, ranks: int) -> None:
    """Without a word. The others hear of it by their connections, not when their patience ends."""
    began = time.monotonic()
    failing(rank, ranks, lambda: os.kill(os.getpid(), signal.SIGKILL), "has ended in a step")
    assert time.monotonic() - began < 60


def hangs(rank: int, ranks: int) -> None:
    """Until the others have ended their step."""
    key = "tests/has ended"

    def hang() -> None:
        while not shared_store().check([key]):
            time.sleep(0.1)

    failing(rank, ranks, hang, "hangs")
    shared_store().set(key, "")
