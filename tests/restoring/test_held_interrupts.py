"""An interrupt that waits until a recording is between two operations."""

import signal
import threading
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.restoring.held_interrupts import HeldInterrupts


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_it_is_asked_for() -> None:
    with HeldInterrupts() as interrupts:
        interrupts.check()
        _interrupt()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            interrupts.check()
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_raised_at_the_end_if_nobody_asks() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^$"), HeldInterrupts():
        _interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_goes_through_at_once() -> None:
    with HeldInterrupts():
        _interrupt()
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            _interrupt()


def test_a_handler_of_the_users_is_called_later_and_stays() -> None:
    calls: list[int] = []

    def handler(number: int, frame: types.FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, handler)
    with HeldInterrupts() as interrupts, HeldInterrupts():
        _interrupt()
        assert calls == []
        interrupts.check()
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    with HeldInterrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_nothing_is_held() -> None:
    handlers: list[object] = []

    def enter() -> None:
        with HeldInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


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
