"""What happens when the user's code fails: rule 5, "the first failure wins"."""

import _thread
import copy
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.execution.lanes.lane_threads import LaneThreads
from blockpipe.execution.lanes.thread_pool import close_idle_threads, idle_threads, pool

from ..models import SCHEDULES
from ..stage_devices import assert_close, equal, stages

HERE = os.path.basename(__file__)
STAGES, CHUNKS, ROWS = 3, 4, 8
ERRORS = [ValueError, SystemExit, KeyboardInterrupt]


class Bomb:
    """Raises at one (place, stage, micro-batch) while it is armed."""

    def __init__(self) -> None:
        self.at: tuple[str, int, int] | None = None
        self.error: type[BaseException] = ValueError
        self.visits: list[tuple[str, int, int]] = []
        self.before: Callable[[], None] = lambda: None

    def arm(self, place: str, stage: int, microbatch: int, error: type[BaseException]) -> None:
        self.at, self.error = (place, stage, microbatch), error

    def visit(self, place: str, stage: int, microbatch: int | None) -> None:
        if microbatch is None:
            return
        self.visits.append((place, stage, microbatch))
        if (place, stage, microbatch) == self.at:
            self.before()
            raise self.error("boom")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bomb":
        return Bomb()  # a plain copy's own, never armed


class Fuse(torch.autograd.Function):
    """The identity, whose backward visits the bomb."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb, place: str, stage: int) -> Tensor:
        ctx.bomb, ctx.place, ctx.stage = bomb, place, stage
        ctx.microbatch = bp.current_microbatch()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.bomb.visit(ctx.place, ctx.stage, ctx.microbatch)
        return gradient, None, None, None


class Layer(nn.Module):
    """One stage's module: it may fail in forward, in a custom backward, in a tensor hook."""

    def __init__(self, bomb: Bomb, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bomb, self.stage = bomb, stage

    def forward(self, x: Tensor) -> Tensor:
        bomb, stage, m = self.bomb, self.stage, bp.current_microbatch()
        bomb.visit("module", stage, m)
        x = torch.tanh(self.linear(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: bomb.visit("module hook", stage, m))
        return Fuse.apply(x, bomb, "module backward", stage)


class Net(nn.Module):
    """Three stages, with places to fail in the glue too."""

    def __init__(self, bomb: Bomb) -> None:
        super().__init__()
        self.bomb = bomb
        self.layers = nn.ModuleList(Layer(bomb, stage) for stage in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                x = layer(x)
                m = bp.current_microbatch()
                self.bomb.visit("glue", stage, m)
                x = Fuse.apply(x, self.bomb, "glue backward", stage)
                if x.requires_grad:
                    x.register_hook(
                        lambda g, stage=stage, m=m: self.bomb.visit("glue hook", stage, m)
                    )
        return x


def make(schedule: str, **options: Any) -> tuple[Bomb, Net, nn.Module, bp.Pipeline]:
    """An armed-able net, its plain copy, and a pipeline that has been recorded and placed."""
    torch.manual_seed(0)
    bomb = Bomb()
    net = Net(bomb)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(
        net,
        devices=stages(STAGES),
        chunks=CHUNKS,
        schedule=schedule,
        sample=((torch.zeros(ROWS, 4),), {}),
        **options,
    )
    return bomb, net, plain, pipe


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 4, generator=generator)


def loss_fn_with(bomb: Bomb) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        bomb.visit("loss", STAGES - 1, bp.current_microbatch())
        return F.mse_loss(output, target)

    return loss_fn


def step(pipe: bp.Pipeline, bomb: Bomb, how: str) -> None:
    x, y = batch()
    if how == "forward_backward":
        pipe.forward_backward(x, target=y, loss_fn=loss_fn_with(bomb))
    else:
        F.mse_loss(pipe(x), y.to(pipe.output_device)).backward()


def busy_threads() -> int:
    """Our threads that are not idle, once those that have just finished are back in the pool.

    A thread goes back to the pool right after the step it worked for has returned.
    """
    deadline = time.monotonic() + 5
    while True:
        alive = sum(t.name == "blockpipe" for t in threading.enumerate())
        busy = alive - idle_threads()
        if busy == 0 or time.monotonic() > deadline:
            return busy
        os.sched_yield()


def assert_recovers(net: nn.Module, plain: nn.Module, pipe: bp.Pipeline, bomb: Bomb) -> None:
    """Nothing of ours is left, and the next call gives the plain loop's gradients."""
    for name, module in net.named_modules():
        assert "forward" not in module.__dict__, name
    assert torch.autograd.Function.apply.__module__ != "blockpipe.glue"
    assert busy_threads() == 0
    assert bp.current_stage() is None
    assert bp.current_microbatch() is None
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    bomb.at = None
    for how in ("forward_backward", "call"):
        net.zero_grad()
        plain.zero_grad()
        x, y = batch()
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            (F.mse_loss(plain(part), target) / CHUNKS).backward()
        step(pipe, bomb, how)
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            if how == "forward_backward":
                assert equal(p.grad, q.grad), name
            assert_close(p.grad, q.grad, msg=name)
    assert busy_threads() == 0


def catch(error: type[BaseException], function: Callable[[], Any]) -> BaseException:
    """The exception, for what ``pytest.raises`` cannot keep from ending the test run."""
    with pytest.raises(error, match="boom") as caught:
        function()
    return caught.value


def assert_says_where(error: BaseException, phase: str, stage: int, microbatch: int) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    visits = [f for f in frames if f.name == "visit" and os.path.basename(f.filename) == HERE]
    assert visits, "the user's own frame is in the traceback"
    notes = getattr(error, "__notes__", [])
    assert len(notes) == 1, notes
    assert f"{phase} of micro-batch {microbatch} on stage {stage}" in notes[0]
    assert f"{HERE}:{visits[-1].lineno}" in notes[0]


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


FORWARD = [("module", s, m) for s in range(STAGES) for m in range(CHUNKS)] + [
    ("glue", s, m) for s in range(STAGES) for m in (0, CHUNKS - 1)
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("place", FORWARD, ids=str)
def test_a_failure_in_forward_reaches_the_caller(
    schedule: str, place: tuple[str, int, int]
) -> None:
    """An exception in any stage and micro-batch's forward reaches the caller, who can go on."""
    for how in ("forward_backward", "call"):
        bomb, net, plain, pipe = make(schedule)
        bomb.arm(*place, ValueError)
        error = catch(ValueError, partial(step, pipe, bomb, how))
        assert_says_where(error, "forward", *place[1:])
        assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", ERRORS[1:])
@pytest.mark.parametrize("place", [("module", 0, 0), ("glue", 1, 2), ("module", 2, 3)], ids=str)
@pytest.mark.parametrize("how", ["forward_backward", "call"])
def test_exit_and_interrupt_in_forward_reach_the_caller(
    schedule: str, error: type[BaseException], place: tuple[str, int, int], how: str
) -> None:
    """SystemExit and KeyboardInterrupt raised in a forward reach the caller as other errors do."""
    bomb, net, plain, pipe = make(schedule)
    bomb.arm(*place, error)
    assert_says_where(catch(error, lambda: step(pipe, bomb, how)), "forward", *place[1:])
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("microbatch", range(CHUNKS))
def test_a_failure_in_loss_fn_is_of_the_last_stage(
    schedule: str, error: type[BaseException], microbatch: int
) -> None:
    """An exception in loss_fn is one of the last stage's forward."""
    bomb, net, plain, pipe = make(schedule)
    bomb.arm("loss", STAGES - 1, microbatch, error)
    found = catch(error, lambda: step(pipe, bomb, "forward_backward"))
    assert_says_where(found, "forward", STAGES - 1, microbatch)
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ["module backward", "glue backward", "module hook", "glue hook"])
@pytest.mark.parametrize(("stage", "microbatch"), [(0, 0), (1, 3), (2, 0), (2, 2)])
@pytest.mark.parametrize("how", ["forward_backward", "call"])
def test_a_failure_in_backward_reaches_the_caller(
    schedule: str, what: str, stage: int, microbatch: int, how: str
) -> None:
    """An exception in a custom backward or a tensor hook reaches the caller, who can go on."""
    bomb, net, plain, pipe = make(schedule)
    bomb.arm(what, stage, microbatch, ValueError)
    error = catch(ValueError, lambda: step(pipe, bomb, how))
    assert_says_where(error, "backward", stage, microbatch)
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", ERRORS[1:])
@pytest.mark.parametrize("what", ["module backward", "glue hook"])
@pytest.mark.parametrize("how", ["forward_backward", "call"])
def test_exit_and_interrupt_in_backward_reach_the_caller(
    schedule: str, error: type[BaseException], what: str, how: str
) -> None:
    """SystemExit and KeyboardInterrupt raised in a backward reach the caller as other errors do."""
    bomb, net, plain, pipe = make(schedule)
    bomb.arm(what, 1, 2, error)
    assert_says_where(catch(error, lambda: step(pipe, bomb, how)), "backward", 1, 2)
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failure_under_isolation_reaches_the_caller(schedule: str) -> None:
    """Under isolate=True a failure is reported and recovered from in the same way."""
    bomb, net, plain, pipe = make(schedule, isolate=True)
    bomb.arm("module", 1, 1, ValueError)
    error = catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
    assert_says_where(error, "forward", 1, 1)
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_after_a_failure_other_micro_batches_stop(schedule: str) -> None:
    """After a failure on the first stage no later micro-batch begins, nor any backward."""
    bomb, net, plain, pipe = make(schedule)
    bomb.visits.clear()
    bomb.arm("module", 0, 1, ValueError)
    catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
    assert ("module", 0, 2) not in bomb.visits
    assert ("module", 0, 3) not in bomb.visits
    assert ("module", 1, 1) not in bomb.visits
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.cpu("one run at a time runs Python on accelerators")
def test_the_first_of_two_failures_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """When two runs fail, the caller gets the one that failed first."""
    bomb, net, plain, pipe = make("gpipe")
    second_is_under_way, first_has_failed = threading.Event(), threading.Event()
    failed = LaneThreads.fail

    def fail(self: LaneThreads, error: BaseException) -> None:
        failed(self, error)
        first_has_failed.set()

    monkeypatch.setattr(LaneThreads, "fail", fail)
    step(pipe, bomb, "forward_backward")  # in the first step stages take turns: they may draw
    net.zero_grad()
    armed = True

    def visit(place: str, stage: int, microbatch: int | None) -> None:
        if armed and (place, stage, microbatch) == ("module", 1, 0):
            assert second_is_under_way.wait(20)
            raise ValueError("boom first")
        if armed and (place, stage, microbatch) == ("module", 0, 1):
            second_is_under_way.set()
            assert first_has_failed.wait(20)
            raise ValueError("boom second")

    monkeypatch.setattr(bomb, "visit", visit)
    found = catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
    assert str(found) == "boom first"
    armed = False
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("how", ["forward_backward", "call"])
def test_catching_everything_does_not_keep_a_failed_step_going(how: str) -> None:
    """A user's ``except Exception`` around a stage does not swallow the end of a failed step."""
    torch.manual_seed(0)
    reached: list[int | None] = []

    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(STAGES))
            self.armed = False

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(0):
                x = self.layers[0](x)
                if self.armed and bp.current_microbatch() == 0:
                    raise ValueError("boom")
            try:
                with bp.Block(1):
                    x = self.layers[1](x)
            except Exception:
                pass
            reached.append(bp.current_microbatch())
            with bp.Block(2):
                return self.layers[2](x)

    net = Stubborn()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, sample=((torch.zeros(8, 4),), {}))
    x, y = batch()
    net.armed = True
    reached.clear()
    with pytest.raises(ValueError, match="boom"):  # noqa: PT012
        if how == "call":
            pipe(x)
        else:
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    assert 0 not in reached
    net.armed = False
    assert torch.isfinite(pipe.forward_backward(x, target=y, loss_fn=F.mse_loss).loss)
    assert busy_threads() == 0


def test_failed_backward_of_a_call_cannot_be_tried_again() -> None:
    """After a failed backward of pipe(x), another backward of it is an error; a new call works."""
    bomb, net, plain, pipe = make("1f1b")
    x, y = batch()
    loss = F.mse_loss(pipe(x), y.to(pipe.output_device))
    bomb.arm("module backward", 1, 1, ValueError)
    catch(ValueError, loss.backward)
    bomb.at = None
    with pytest.raises((UsageError, RuntimeError), match=r"already|second time"):
        loss.backward()
    assert_recovers(net, plain, pipe, bomb)


def test_a_failure_with_two_calls_outstanding_leaves_the_other() -> None:
    """A failed backward of one pipe(x) leaves another outstanding one as it was."""
    bomb, net, plain, pipe = make("1f1b")
    x, y = batch()
    good, bad = (F.mse_loss(pipe(x), y.to(pipe.output_device)) for _ in range(2))
    bomb.arm("glue backward", 0, 2, ValueError)
    catch(ValueError, bad.backward)
    bomb.at = None
    net.zero_grad()
    good.backward()
    F.mse_loss(plain(x), y).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failure_while_recording_leaves_the_model(schedule: str) -> None:
    """SystemExit in the recording pass reaches the caller and leaves the model as it was."""
    bomb = Bomb()
    net = Net(bomb)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=CHUNKS, schedule=schedule)

    def interrupt(module: nn.Module, args: Any) -> None:
        raise SystemExit("boom")

    handle = net.layers[1].linear.register_forward_pre_hook(interrupt)
    x, _ = batch()
    catch(SystemExit, lambda: pipe(x))
    handle.remove()
    assert_recovers(net, plain, pipe, bomb)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_in_loss_reduction_comes_before_any_forward(
    schedule: str, error: type[BaseException]
) -> None:
    """An exception in a loss_reduction callable comes before any forward has run."""
    armed = True

    def count(args: Any, kwargs: Any, target: Any) -> float:
        if armed:
            raise error("boom")
        return 1.0

    bomb, net, plain, pipe = make(schedule, loss_reduction=count)
    bomb.visits.clear()
    catch(error, lambda: step(pipe, bomb, "forward_backward"))
    assert bomb.visits == []
    armed = False
    assert_recovers(net, plain, pipe, bomb)


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


PLACES = [
    (("module", 1, 1), "forward_backward"),
    (("module", 1, 1), "call"),
    (("module backward", 1, 1), "forward_backward"),
    (("module backward", 1, 1), "call"),
]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("place", "how"), PLACES, ids=str)
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


@pytest.mark.parametrize("deliver", [_raise_signal, _thread.interrupt_main])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("place", "how"), PLACES, ids=str)
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


@pytest.mark.parametrize("how", ["forward_backward", "call"])
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
