"""Tests of :mod:`blockpipe._common.profilers`: two may look at once, and the user's comes back."""

import cProfile
import sys
import types
from typing import Any

import pytest

from blockpipe._common.profilers import calls_seen_by


def work() -> None:
    pass


class Seen:
    """A function for ``sys.setprofile``, and the names of what it saw."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def called(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.names.append(frame.f_code.co_name)


def test_without_another_profiler_it_sees_and_goes() -> None:
    seen = Seen()
    with calls_seen_by(seen.called) as sees:
        work()
    assert sees
    assert "work" in seen.names
    assert sys.getprofile() is None


def test_a_profiler_in_python_sees_too_and_comes_back() -> None:
    seen, users = Seen(), Seen()
    profiler = users.called
    sys.setprofile(profiler)
    try:
        with calls_seen_by(seen.called) as sees:
            work()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert sees
    assert "work" in seen.names
    assert "work" in users.names


def test_cprofile_goes_on_afterwards() -> None:
    seen, users = Seen(), cProfile.Profile()
    users.enable()
    try:
        with calls_seen_by(seen.called) as sees:
            pass
        work()
    finally:
        users.disable()
    users.create_stats()
    assert sees
    assert any(name == "work" for _, _, name in users.stats)  # type: ignore[attr-defined]


def test_an_error_in_the_block_puts_the_profiler_back() -> None:
    users = Seen()
    profiler = users.called
    sys.setprofile(profiler)
    try:
        with pytest.raises(KeyError), calls_seen_by(Seen().called):
            raise KeyError("of the test")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_beside_another_profiler_in_c_it_says_that_it_sees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen()
    monkeypatch.setattr(sys, "getprofile", object)
    with calls_seen_by(seen.called) as sees:
        work()
    assert not sees
    assert not seen.names
