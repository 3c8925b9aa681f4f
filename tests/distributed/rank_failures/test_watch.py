"""Verdicts about processes, from their signs of life: without processes, on a clock of its own."""

from types import SimpleNamespace

import pytest

from blockpipe.distributed.rank_failures import watch as module
from blockpipe.distributed.rank_failures.board import Beat, Board, Verdict
from blockpipe.distributed.rank_failures.progress import ProcessProgress
from blockpipe.distributed.rank_failures.watch import SILENT, SILENT_IF_LOST, Watch

TIMEOUT = 100


class _Board(Board):
    """A board without a store."""

    def __init__(self) -> None:
        self.found: dict[int, Beat] = {}
        self.decided: Verdict | None = None

    def beats(self) -> dict[int, Beat]:
        return dict(sorted(self.found.items()))

    def beat(self, rank: int) -> Beat:
        return self.found[rank]

    def verdict(self) -> Verdict | None:
        return self.decided

    def decide(self, verdict: Verdict) -> Verdict:
        self.decided = self.decided or verdict
        return self.decided


class Processes:
    """Three processes, as one of them sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(module, "time", clock)
        self.board = _Board()
        self.progress = ProcessProgress()
        self.watch = Watch(self.board, self.progress, rank, [0, 1, 2], TIMEOUT)
        self.number = 0

    def live(self, seconds: float, **beats: Beat) -> str:
        """Let some seconds pass, in which some processes give signs of life; return the verdict."""
        for _ in range(int(seconds)):
            self.now += 1
            self.number += 1
            for name, beat in beats.items():
                given = {**vars(beat), "number": self.number}
                self.board.found[int(name.removeprefix("rank"))] = Beat(**given)
            self.watch._look()
        return "" if self.board.decided is None else self.board.decided.text


WAITS = Beat(is_inside=True, is_waiting=True, status="waits for a tensor")
COMPUTES = Beat(is_inside=True, status="is in a forward", stack="its stack")
OUTSIDE = Beat(status="is outside of a step")


def test_a_process_that_computes_for_too_long_is_blamed_with_its_stack(monkeypatch) -> None:
    """Only after the time that it has."""
    here = Processes(monkeypatch)
    beats = {"rank0": WAITS, "rank1": COMPUTES, "rank2": WAITS}
    assert not here.live(TIMEOUT, **beats)
    text = here.live(3, **beats)
    assert "no rank went on for 100 s: rank 1 is in a forward, and the others wait" in text
    assert "rank 1 is here:\nits stack" in text
    assert here.board.decided.stalled == [1]


def test_processes_that_wait_for_each_other_are_all_named(monkeypatch) -> None:
    """None of them is ended before the others."""
    here = Processes(monkeypatch)
    text = here.live(TIMEOUT + 3, rank0=WAITS, rank1=WAITS, rank2=WAITS)
    assert "all wait for each other" in text
    assert "rank 2 waits for a tensor" in text
    assert here.board.decided.stalled == []


def test_a_process_that_others_wait_for_between_two_steps_is_blamed(monkeypatch) -> None:
    here = Processes(monkeypatch)
    text = here.live(TIMEOUT + 3, rank0=WAITS, rank1=WAITS, rank2=OUTSIDE)
    assert "rank 2 is outside of a step, and the others wait" in text
    assert here.board.decided.stalled == [2]


def test_time_between_steps_does_not_count_where_nobody_waits(monkeypatch) -> None:
    here = Processes(monkeypatch)
    outside = {"rank0": OUTSIDE, "rank1": OUTSIDE, "rank2": OUTSIDE}
    assert not here.live(5 * TIMEOUT, **outside)
    assert not here.live(TIMEOUT / 2, **{**outside, "rank0": WAITS})


def test_a_slow_step_is_no_hang(monkeypatch) -> None:
    """Each of its operations has the time."""
    here = Processes(monkeypatch)
    for count in range(4):
        busy = Beat(**{**vars(COMPUTES), "count": count})
        assert not here.live(TIMEOUT - 1, rank0=WAITS, rank1=busy, rank2=WAITS)


@pytest.mark.parametrize("lost", [False, True])
def test_a_silent_process_is_gone(monkeypatch, lost: bool) -> None:
    """Sooner where somebody has lost a connection."""
    here = Processes(monkeypatch)
    seen = Beat(**{**vars(WAITS), "is_lost": lost})
    here.live(2, rank0=WAITS, rank1=COMPUTES, rank2=WAITS)
    limit = SILENT_IF_LOST if lost else SILENT
    assert not here.live(limit, rank0=WAITS, rank2=seen)
    text = here.live(2, rank0=WAITS, rank2=seen)
    assert "rank 1 has ended in a step without a word" in text
    assert "the last one said that it is in a forward" in text


@pytest.mark.parametrize("lost", [False, True])
def test_a_process_that_has_left_is_named_only_where_it_is_missed(monkeypatch, lost: bool) -> None:
    """Another one may still end the last step."""
    here = Processes(monkeypatch)
    left = Beat(**{**vars(OUTSIDE), "has_left": True})
    seen = Beat(**{**vars(WAITS), "is_lost": lost})
    text = here.live(5, rank0=seen, rank1=left, rank2=WAITS)
    assert ("rank 1 takes part no more" in text) == lost


def test_the_first_process_is_looked_after_by_the_others(monkeypatch) -> None:
    """It has given no sign of life."""
    here = Processes(monkeypatch, rank=2)
    with here.progress.inside():
        here.live(2, rank0=WAITS)
        assert not here.live(SILENT)
        assert "rank 0 has ended in a step without a word" in here.live(2)


def test_no_process_is_gone_where_the_machine_has_slept(monkeypatch) -> None:
    """All of them were silent."""
    here = Processes(monkeypatch)
    beats = {"rank0": WAITS, "rank1": COMPUTES, "rank2": WAITS}
    here.live(2, **beats)
    here.now += 10 * SILENT
    assert not here.live(1)
    assert not here.live(3, **beats)
