"""Signals that wait until their handlers do no harm."""

import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.restoring.held_signals import HeldSignals, RestoredWhole

from ..interrupting import interrupting, traced
from ..models import square


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_it_is_asked_for() -> None:
    with HeldSignals() as interrupts:
        interrupts.check()
        _interrupt()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            interrupts.check()
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_raised_at_the_end_if_nobody_asks() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"), HeldSignals():
        _interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_goes_through_at_once() -> None:
    with HeldSignals():
        _interrupt()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            _interrupt()


@contextmanager
def handled(number: int, handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_users_is_called_at_the_end_and_stays(number: int) -> None:
    """It may set what is put back meanwhile, and nobody knows whether it raises."""
    calls: list[int] = []
    with handled(number, lambda number, _: calls.append(number)):
        with HeldSignals() as outer, HeldSignals() as inner:
            signal.raise_signal(number)
            inner.check()
            outer.check()
            assert calls == []
            signal.raise_signal(number)
        assert calls == [number, number]
        signal.raise_signal(number)
        assert calls == [number, number, number]


def test_handlers_are_called_in_the_order_of_their_signals_also_behind_one_that_raises() -> None:
    calls: list[int] = []

    def late(number: int, frame: types.FrameType | None) -> None:
        calls.append(number)
        raise TimeoutError("late")

    def count(number: int, frame: types.FrameType | None) -> None:
        calls.append(number)

    def send() -> None:
        with HeldSignals():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                signal.raise_signal(number)

    with handled(signal.SIGTERM, count), handled(signal.SIGUSR1, late):
        with pytest.raises(TimeoutError, match="late"):
            send()
        assert calls == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    with HeldSignals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_nothing_is_held() -> None:
    handlers: list[object] = []

    def enter() -> None:
        with HeldSignals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_an_interrupt_goes_through_where_nothing_is_recorded() -> None:
    with RestoredWhole[None](), pytest.raises(KeyboardInterrupt, match=r"^$"):
        _interrupt()


def test_an_interrupt_waits_in_a_recording_under_what_is_restored() -> None:
    with RestoredWhole[None](), HeldSignals() as signals:
        _interrupt()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            signals.check()


def test_no_interrupt_cuts_short_what_is_restored() -> None:
    """At whatever bytecode it comes: all values are as they were, and the handlers too."""
    values = dict.fromkeys("abc", 0)

    @contextmanager
    def changed(name: str) -> Iterator[None]:
        try:
            values[name] = 1
            yield
        finally:
            values[name] = 0

    def run() -> None:
        with RestoredWhole(*map(changed, values)):
            pass

    seen = [0]
    traced(interrupting(-1, seen, _interrupt, __file__), run)
    assert seen[0] > 100
    for bytecode in range(1, seen[0] + 1):
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            traced(interrupting(bytecode, [0], _interrupt, __file__), run)
        assert set(values.values()) == {0}, bytecode
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Interrupted(nn.Module):
    """Is interrupted in its forward, and prints how far it comes."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            _interrupt()
        print("behind the interrupt")
        h = self.layer(x)
        print("behind the operation")
        return h


@pytest.mark.parametrize("fake", [True, False])
def test_a_recording_is_interrupted_between_two_operations(
    fake: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Interrupted(1)
    weight = net.layer.weight
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        bp.record(net, torch.zeros(2, 4), fake=fake)
    assert capsys.readouterr().out == "behind the interrupt\n"
    assert net.layer.weight is weight
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    net.times = 0
    assert bp.record(net, torch.zeros(2, 4), fake=fake).route == [0]


def test_a_second_interrupt_ends_a_recording_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        bp.record(Interrupted(2), torch.zeros(2, 4))
    assert capsys.readouterr().out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


stop = False


class Preempted(nn.Module):
    """Gets a signal in its forward, whose handler sets a global and an attribute that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.number: int = signal.SIGTERM
        self.stop = self.calls = self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with bp.Block(stage=0):
            signal.raise_signal(self.number)
            h = self.first(x) * (1 + self.step)
        with bp.Block(stage=1):
            return self.second(h) * (1 + self.stop)


@pytest.mark.parametrize("fake", [True, False])
def test_what_a_handler_sets_during_a_recording_stays(
    fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no code of the forward's: nothing is put back, and no stage is said to set it."""
    net = Preempted()
    monkeypatch.setitem(globals(), "stop", False)

    def preempted(number: int, frame: types.FrameType | None) -> None:
        globals()["stop"] = True
        net.stop += 1

    with handled(signal.SIGTERM, preempted):
        bp.record(net, torch.zeros(2, 4), fake=fake)
    assert (stop, net.calls) == (True, 0)
    assert 1 <= net.stop <= 2  # a recording may run the forward twice


def test_what_a_handler_sets_stays_where_numbers_that_remember_are_taken_back() -> None:
    net, sets = Preempted(), [7, *[None] * 99]
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=1)
    x = torch.randn(4, 4)

    def preempted(number: int, frame: types.FrameType | None) -> None:
        if (value := sets.pop(0)) is not None:
            net.step = value

    with handled(signal.SIGTERM, lambda *_: None):
        for net.step in range(3):
            pipe.forward_backward(x, loss_fn=square)
    with handled(signal.SIGTERM, preempted), torch.no_grad():
        pipe(x)  # is recorded
    assert net.step == 7


@pytest.mark.parametrize("what", ["verify", "find_chunks", "balance"])
def test_what_a_handler_sets_stays_behind_a_report_that_restores_the_model(what: str) -> None:
    net, calls = Preempted(), list[int]()
    x = torch.randn(4, 4)

    def preempted(number: int, frame: types.FrameType | None) -> None:
        net.stop += 1
        calls.append(number)

    with handled(signal.SIGTERM, preempted):
        if what == "balance":
            bp.balance(nn.Sequential(net, nn.Linear(4, 4)), x, 2)
        else:
            pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, schedule="sequential")
            report = getattr(pipe, what)
            report(x, loss_fn=square, **({"candidates": [1, 2]} if what == "find_chunks" else {}))
    assert net.stop == len(calls) > 0
    assert net.calls == 0


def test_an_exception_of_a_handlers_own_is_raised_behind_a_recording(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = Interrupted(1)
    weight = net.layer.weight

    def late(number: int, frame: types.FrameType | None) -> None:
        raise TimeoutError("too late")

    with handled(signal.SIGINT, late), pytest.raises(TimeoutError, match="too late"):
        bp.record(net, torch.zeros(2, 4))
    assert net.layer.weight is weight
