"""What the user's own code says while it is recorded: nothing twice, and nothing lost."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError

from ..models import square
from ..stage_devices import stages


class Says(nn.Module):
    """Says something on the first stage."""

    def __init__(self, say: Callable[[], object], *, real: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.say, self.real = nn.Linear(4, 4), nn.Linear(4, 4), say, real

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            self.say()
            h = self.a(x)
            if self.real and h.sum() > 1e9:  # a recording on fake tensors comes as far as here
                return h
        with bp.Block(1):
            return self.b(h)


def _step(net: nn.Module) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


@pytest.mark.parametrize("real", [False, True])
def test_prints_come_once_for_each_micro_batch(real: bool) -> None:
    """There were two more of them, or three where the recording was real."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        _step(Says(lambda: print("here"), real=real))
    assert text.getvalue() == "here\n" * 4


class Keeps(logging.Handler):
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("real", [False, True])
def test_log_records_come_once_for_each_micro_batch(real: bool) -> None:
    """Also to a handler of the user's, which no object in the forward's reach has."""
    logger, keeps, text = logging.getLogger("of the user's"), Keeps(), io.StringIO()
    handlers = [keeps, logging.StreamHandler(text)]
    for handler in handlers:
        logger.addHandler(handler)
    try:
        _step(Says(lambda: logging.getLogger("of the user's").warning("here"), real=real))
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
    assert keeps.lines == ["here"] * 4
    assert text.getvalue() == "here\n" * 4


@pytest.mark.parametrize("real", [False, True])
def test_what_another_thread_logs_during_a_recording_is_kept(real: bool) -> None:
    """By a handler of the user's, too; it lost the records with what the recording had left."""
    logger, keeps = logging.getLogger("of another thread"), Keeps()
    logger.addHandler(keeps)
    go, done = threading.Event(), threading.Event()

    def logs() -> None:
        assert go.wait(10)
        logger.warning("there")
        done.set()

    def meanwhile() -> None:
        go.set()
        assert done.wait(10)

    thread = threading.Thread(target=logs)
    thread.start()
    try:
        bp.record(Says(meanwhile, real=real), torch.zeros(2, 4))
    finally:
        thread.join()
        logger.removeHandler(keeps)
    assert keeps.lines == ["there"]


class Alarms(logging.Handler):
    """Counts what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Alarmed(nn.Module):
    """Logs on its first stage, and on the second one reads what a handler has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.log = nn.Linear(4, 4), nn.Linear(4, 4), logging.getLogger("alarms")

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.log.warning("here")
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) / (1 + self.log.handlers[0].count)  # type: ignore[attr-defined]


def test_what_a_handler_counts_is_refused_where_another_stage_reads_it() -> None:
    logging.getLogger("alarms").addHandler(handler := Alarms())
    try:
        with pytest.raises(StateError, match="count"):
            _step(Alarmed())
        assert handler.count == 0
    finally:
        logging.getLogger("alarms").removeHandler(handler)


class Once(logging.Filter):
    """A filter that lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        return _is_new(self.seen, record)


def _is_new(seen: set[str], record: logging.LogRecord) -> bool:
    is_new = record.getMessage() not in seen
    seen.add(record.getMessage())
    return is_new


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("kind", [Once, "function"])
def test_filters_of_a_logger_see_no_recording(real: bool, kind: Any) -> None:
    """What they count is put back, so the step's own record passes."""
    logger, keeps, seen = logging.getLogger("filtered"), Keeps(), set[str]()
    filter_ = Once() if kind is Once else lambda record: _is_new(seen, record)
    logger.addHandler(keeps)
    logger.addFilter(filter_)
    try:
        _step(Says(lambda: logging.getLogger("filtered").warning("here"), real=real))
    finally:
        logger.removeHandler(keeps)
        logger.removeFilter(filter_)
    assert keeps.lines == ["here"]


@pytest.mark.parametrize(("action", "times"), [("always", 4), ("default", 1), ("once", 1)])
def test_warnings_come_as_in_the_plain_loop(action: Any, times: int) -> None:
    """Python notes which ones it has shown: those that a recording has kept count as new."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        _step(Says(lambda: warnings.warn(f"small batch {action}", stacklevel=1)))
    assert [str(w.message) for w in found if "small" in str(w.message)] == [
        f"small batch {action}"
    ] * times


def test_what_was_said_before_a_recording_failed_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may say why; of the run on fake tensors and the real one, it is the last one's."""

    def say() -> None:
        print("the width is 4")
        raise ValueError("wrong width")

    with pytest.raises(RecordingError, match="wrong width"):
        bp.record(Says(say), torch.zeros(2, 4))
    assert capsys.readouterr().out == "the width is 4\n"


def test_what_other_threads_say_meanwhile_goes_where_it_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stream is the process's."""

    def say() -> None:
        thread = threading.Thread(target=lambda: print("beside"))
        thread.start()
        thread.join()

    bp.record(Says(say), torch.zeros(2, 4))
    assert set(capsys.readouterr().out.splitlines()) == {"beside"}


def test_what_torch_warns_of_once_in_a_recording_is_not_lost() -> None:
    """A library may say something only once, and the step would not repeat it."""
    source = "def warn_once():\n    import warnings\n    warnings.warn('a prototype')\n"
    names: dict[str, Any] = {"__name__": "torch.nested"}
    exec(source, names)
    with pytest.warns(UserWarning, match="a prototype"):
        bp.record(Says(lambda: names["warn_once"]()), torch.zeros(2, 4))


_ONCE = """
import functools, warnings

@functools.lru_cache(None)
def log_once(logger, text):
    tell(logger, text)

def tell(logger, text):
    logger.warning(text)

@functools.cache
def warn_once(text):
    warnings.warn(text)
"""


def _of_library() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "torch.nested"}
    exec(_ONCE, names)
    return names


@pytest.mark.parametrize("is_new", [True, False])
def test_a_line_that_a_library_logs_only_once_comes_once(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function with the cache forgets the recording's call, and no call of before."""
    monkeypatch.setattr(logging.Logger, "log_once", _of_library()["log_once"], raising=False)
    log: Any = logging.getLogger("of a library")
    log.addHandler(keeps := Keeps())
    try:
        if not is_new:
            log.log_once("a deep stack")
        _step(Says(lambda: log.log_once("a deep stack")))
        assert keeps.lines == ["a deep stack"]
    finally:
        log.removeHandler(keeps)


def test_a_warning_that_a_library_gives_only_once_comes_once() -> None:
    """The recording keeps it, and the step gives it."""
    warn_once = _of_library()["warn_once"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _step(Says(lambda: warn_once("a shallow stack")))
    assert [str(w.message) for w in found if "stack" in str(w.message)] == ["a shallow stack"]


def _places() -> tuple[object, ...]:
    streams = sys.stdout, sys.stderr, warnings.showwarning
    return *streams, logging.Handler.handle, logging.getLogRecordFactory()


def test_streams_are_those_of_before() -> None:
    """A recording puts its own in their place meanwhile, and takes them away if it fails, too."""

    def fail() -> None:
        raise ValueError("no")

    before = _places()
    for say in (fail, lambda: None):
        with contextlib.suppress(RecordingError):
            bp.record(Says(say), torch.zeros(2, 4))
    assert _places() == before
