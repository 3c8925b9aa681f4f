"""Other threads' calls of a model that is recorded."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from blockpipe._common.threads import standstill
from blockpipe.recording.watching import closed_modules


class Held:
    """What a caller's frame holds."""


@pytest.mark.parametrize(
    "looks", [lambda: closed_modules._places_of_calls(set()), standstill._is_debugged]
)
def test_who_looks_at_all_threads_keeps_no_frame(
    looks: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own frame is one of them, and behind it is all that a step holds. Python says in no order
    which thread is the last."""
    frames = sys._current_frames

    def own_comes_last() -> dict[int, object]:
        found = frames()
        return found | {threading.get_ident(): found.pop(threading.get_ident())}

    monkeypatch.setattr(sys, "_current_frames", own_comes_last)
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    gc.collect()
    gc.disable()
    try:

        def step() -> weakref.ref[Held]:
            held = Held()
            looks()
            return weakref.ref(held)

        assert step()() is None
    finally:
        gc.enable()
        over.set()
        other.join()
