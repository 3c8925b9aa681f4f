"""Interrupts of the main thread while a step runs, and threads that end."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.execution.lanes.lane_threads import LaneThreads
from blockpipe.execution.lanes.thread_pool import close_idle_threads, idle_threads, pool
from blockpipe.preparation.watched.reading import MemberReads

from ..parameter_sets import every_pair
from ..stage_devices import stages
from .failing_models import (
    STAGES,
    Bomb,
    assert_recovers,
    busy_threads,
    catch,
    make,
    step,
)


@pytest.fixture(autouse=True)
def _fresh_threads() -> Iterator[None]:
    yield
    close_idle_threads()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- an interrupt delivered to the main thread while runs run in others


class Gate:
    """Holds a worker's forward or backward until the main thread has had its interrupt."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        self.deliver = deliver
        self.taken = threading.Event()
        self.delivered = False

    def __call__(self) -> None:
        self.deliver()
        self.delivered = True
        assert self.taken.wait(20), "the interrupt did not reach the main thread"


def _raise_signal() -> None:
    signal.raise_signal(signal.SIGINT)


def _signal_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


PLACES = [("module", 1, 1), ("module backward", 1, 1)]
HOW = ["forward_backward", "call"]


@every_pair(schedule=["1f1b", "gpipe"], place=PLACES, how=HOW)
def test_an_interrupt_of_the_main_thread_ends_the_step(
    schedule: str, place: tuple[str, int, int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while runs run in other threads ends the step, and the next call works."""
    bomb, net, plain, pipe = make(schedule)
    gate = Gate(_signal_main)
    failed = LaneThreads.fail

    def fail(self: LaneThreads, error: BaseException) -> None:
        failed(self, error)
        if isinstance(error, KeyboardInterrupt):
            gate.taken.set()

    monkeypatch.setattr(LaneThreads, "fail", fail)
    bomb.before = gate
    bomb.arm(*place, ValueError)  # raised after the interrupt: it lost
    bomb.visits.clear()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        step(pipe, bomb, how)
    assert gate.delivered
    if place[0] == "module":
        assert ("module", 2, 1) not in bomb.visits
    bomb.before = lambda: None
    assert_recovers(net, plain, pipe, bomb)


@every_pair(
    deliver=[_raise_signal, _thread.interrupt_main],
    schedule=["1f1b", "gpipe"],
    place=PLACES,
    how=HOW,
)
def test_an_interrupt_sent_by_a_micro_batch_is_raised_at_the_end(
    deliver: Callable[[], None], schedule: str, place: tuple[str, int, int], how: str
) -> None:
    """An interrupt that a run sends, which wakes nobody, is raised by the end of the step."""
    bomb, net, plain, pipe = make(schedule)

    class Sent(Bomb):
        def visit(self, place: str, stage: int, microbatch: int | None) -> None:
            if (place, stage, microbatch) == self.at:
                deliver()

    sender = Sent()
    sender.at = place
    bomb.visit = sender.visit  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        step(pipe, bomb, how)
    sender.at = None
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("how", HOW)
def test_an_interrupt_of_a_step_in_one_thread_ends_it(how: str) -> None:
    """Ctrl-C in a step that runs in the caller's own thread ends it, and the next call works."""
    bomb, net, plain, pipe = make("sequential")
    bomb.before = _raise_signal
    bomb.arm("module", 1, 2, ValueError)
    with pytest.raises(KeyboardInterrupt, match="in the forward of micro-batch 2 on stage 1"):
        step(pipe, bomb, how)
    bomb.before = lambda: None
    assert_recovers(net, plain, pipe, bomb)


def test_an_interrupt_before_the_caller_waits_ends_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C after threads were started, but before the caller waits for them, ends them too."""
    bomb, net, plain, pipe = make("1f1b")
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()
    begin, failed = LaneThreads._begin, LaneThreads.fail

    def interrupted(self: LaneThreads) -> None:
        begin(self)
        assert begun.wait(20)
        _raise_signal()

    def fail(self: LaneThreads, error: BaseException) -> None:
        failed(self, error)
        release.set()

    def hold() -> None:
        begun.set()
        assert release.wait(20)
        ended.set()

    monkeypatch.setattr(LaneThreads, "_begin", interrupted)
    monkeypatch.setattr(LaneThreads, "fail", fail)
    bomb.before = hold
    bomb.arm("module", 0, 0, ValueError)
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            step(pipe, bomb, "forward_backward")
        assert ended.is_set(), "the call returned while its runs were still running"
    finally:
        release.set()
    monkeypatch.undo()
    bomb.before = lambda: None
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.slow
def test_threads_do_not_add_up_over_failures() -> None:
    """Twenty failed steps need no more threads than one."""
    bomb, net, plain, pipe = make("1f1b")
    close_idle_threads()
    counts = []
    for _ in range(20):
        bomb.arm("module", 1, 2, ValueError)
        catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
        assert busy_threads() == 0
        counts.append(idle_threads())
    assert max(counts) <= STAGES + STAGES + 1, counts
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.slow
def test_no_thread_is_busy_when_a_step_returns() -> None:
    """When forward_backward has returned, all its threads are idle: close() ends every one."""
    bomb, _, _, pipe = make("1f1b")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that a race shows itself
    try:
        for _ in range(100):
            step(pipe, bomb, "forward_backward")
            pipe.close()
            assert [t for t in threading.enumerate() if t.name == "blockpipe"] == []
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_thread_that_cannot_be_started_is_an_error(count, monkeypatch):
    """Where a thread cannot be started, wherever that happens: the error comes, nothing hangs."""
    net = bp.begin_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), {"1": 1, "2": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=6)
    close_idle_threads()
    started, start = [], threading.Thread.start

    def failing(thread):
        started.append(thread)
        if len(started) == count:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pipe.forward_backward(torch.randn(12, 4), loss_fn=lambda out: out.sum())
    monkeypatch.undo()
    pipe.forward_backward(torch.randn(12, 4), loss_fn=lambda out: out.sum())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_a_signal_handler_that_raises_ends_the_step():
    """Whatever it raises: when it reaches the caller, no thread works for the step any more."""
    waits = threading.Event()

    class Waits(nn.Linear):
        def forward(self, x):
            waits.wait(0.5)
            return super().forward(x)

    net = bp.begin_blocks(nn.Sequential(Waits(4, 4), Waits(4, 4)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    waits.set()
    pipe.forward_backward(torch.randn(8, 4), loss_fn=lambda out: out.sum())
    waits.clear()

    class TimeOutError(Exception):
        pass

    def on_alarm(number, frame):
        raise TimeOutError

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeOutError):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=lambda out: out.sum())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    net.zero_grad()
    waits.set()
    assert not [t for t in threading.enumerate() if t.name == "blockpipe" and is_busy(t)]
    assert all(p.grad is None for p in net.parameters())


def is_busy(thread):
    """Whether a thread of the pool is not in it."""
    return thread not in pool.idle


def test_a_step_behind_one_whose_look_was_interrupted_is_the_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between steps, values of the user's are compared: an exception of a signal's handler may end
    that half-way."""
    bomb, net, plain, pipe = make("sequential")
    add = MemberReads.add

    def interrupted(self: MemberReads, *args: Any) -> None:
        add(self, *args)
        raise TimeoutError("too late")

    for net.options in ([Options(0)], [Options(1)]):
        step(pipe, bomb, "forward_backward")
    net.options = [Options(2)]
    with monkeypatch.context() as patched:
        patched.setattr(MemberReads, "add", interrupted)
        with pytest.raises(TimeoutError, match="too late"):
            step(pipe, bomb, "forward_backward")
    assert_recovers(net, plain, pipe, bomb)


class Options:
    def __init__(self, number: int) -> None:
        self.number = number
