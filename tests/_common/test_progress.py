"""Progress: shown where somebody looks, after a while, and gone at the end."""

import io
import sys
import time
from types import ModuleType

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe._common import progress
from blockpipe._common.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def _run(clock: list[float], times: list[float]) -> None:
    with Progress("recording Net", total=9, unit="module calls") as shown:
        for now in times:
            clock[0] = now
            shown.step("layer")


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """After two seconds, at most ten times a second, and wiped out at the end."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _run(clock, [0.5, 1.9, 2.1, 2.15, 3.0])
    shown = terminal.getvalue().split("\r")
    assert shown[1].rstrip() == "blockpipe: recording Net: 3 of 9 module calls, 2 s, layer"
    assert shown[2].rstrip() == "blockpipe: recording Net: 5 of 9 module calls, 3 s, layer"
    assert shown[3].strip() == ""
    assert shown[4:] == [""]
    assert "\n" not in terminal.getvalue()


def test_nothing_for_what_is_short(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """What is over in two seconds writes nothing at all."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _run(clock, [0.5, 1.0, 1.99])
    assert terminal.getvalue() == ""


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """Neither in a file, nor without a console, nor with the log switched off."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    _run(clock, [5.0, 6.0])
    assert file.getvalue() == ""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bp.set_log_level("off")
    try:
        _run(clock, [15.0, 16.0])
    finally:
        bp.set_log_level(None)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    _run(clock, [25.0, 26.0])


def test_one_plain_line_in_a_notebook(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """A cell keeps what is written to it: one line, not many."""

    class ZMQInteractiveShell:
        pass

    ipython = ModuleType("IPython")
    ipython.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stderr", cell)
    _run(clock, [2.5, 3.0, 4.0])
    assert cell.getvalue().count("\n") == 1
    assert "\r" not in cell.getvalue()


def test_a_failure_wipes_it_out(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """The traceback begins on a line of its own."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = Progress("measuring")

    def fail() -> None:
        with shown:
            clock[0] = 3.0
            shown.step()
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert terminal.getvalue().endswith("\r")
    assert "measuring: 1 steps, 3 s" in terminal.getvalue()


def test_a_recording_tells_of_its_calls(monkeypatch: pytest.MonkeyPatch):
    """One step for each module call that begins."""
    told: list[str] = []
    monkeypatch.setattr(Progress, "step", lambda self, what="", count=1: told.append(what))
    recording = bp.record(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.zeros(1, 4))
    assert told == [call.path for call in recording.calls] == ["", "0", "1"]


def test_long_lines_are_cut(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """A line that wraps could not be written over."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("recording") as shown:
        clock[0] = time.monotonic() + 3
        shown.step("layer." * 50)
    assert max(map(len, terminal.getvalue().split("\r"))) <= 79


class _Tee:
    """What scripts put in the place of stderr, to write to a file as well."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["tee", "closed"])
def test_what_is_in_the_place_of_stderr_need_not_know_what_a_terminal_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Attack 21: no pipeline could be recorded."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", _Tee() if kind == "tee" else closed)
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    assert bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)(torch.randn(8, 4)).shape == (8, 4)
