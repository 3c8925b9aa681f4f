"""What happens when the user's code fails: rule 5, "the first failure wins"."""

import copy
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.execution.lanes.lane_threads import LaneThreads
from blockpipe.execution.lanes.thread_pool import close_idle_threads

from ..models import SCHEDULES
from ..parameter_sets import each_value, every_pair
from ..stage_devices import assert_close, stages
from . import failing_models
from .failing_models import (
    CHUNKS,
    STAGES,
    Bomb,
    Kept,
    Net,
    assert_recovers,
    batch,
    busy_threads,
    catch,
    make,
    step,
)

HERE = os.path.basename(failing_models.__file__)


ERRORS = [ValueError, SystemExit, KeyboardInterrupt]


def assert_says_where(error: BaseException, phase: str, stage: int, microbatch: int) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    visits = [f for f in frames if f.name == "visit" and os.path.basename(f.filename) == HERE]
    assert visits, "the user's own frame is in the traceback"
    notes = getattr(error, "__notes__", [])
    assert len(notes) == 1, notes
    assert f"{phase} of micro-batch {microbatch} on stage {stage}" in notes[0]
    assert f"{HERE}:{visits[-1].lineno}" in notes[0]


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


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


@every_pair(
    schedule=SCHEDULES,
    error=ERRORS,
    what=["module", "glue"],
    stage=range(STAGES),
    microbatch=range(CHUNKS),
    how=["forward_backward", "call"],
)
def test_a_failure_in_forward_reaches_the_caller(
    kept: Kept, schedule: str, error: Any, what: str, stage: int, microbatch: int, how: str
) -> None:
    """An exception of any kind, in any stage's forward of any micro-batch, reaches the caller, who
    can go on, as often as that happens."""
    with kept.made(schedule) as (bomb, net, plain, pipe):
        bomb.arm(what, stage, microbatch, error)
        found = catch(error, lambda: step(pipe, bomb, how))
        assert_says_where(found, "forward", stage, microbatch)
        assert_recovers(net, plain, pipe, bomb)


@every_pair(
    schedule=SCHEDULES,
    error=ERRORS,
    microbatch=range(CHUNKS),
)
def test_a_failure_in_loss_fn_is_of_the_last_stage(
    kept: Kept, schedule: str, error: type[BaseException], microbatch: int
) -> None:
    """An exception in loss_fn is one of the last stage's forward."""
    with kept.made(schedule) as (bomb, net, plain, pipe):
        bomb.arm("loss", STAGES - 1, microbatch, error)
        found = catch(error, lambda: step(pipe, bomb, "forward_backward"))
        assert_says_where(found, "forward", STAGES - 1, microbatch)
        assert_recovers(net, plain, pipe, bomb)


@every_pair(
    schedule=SCHEDULES,
    error=ERRORS,
    what=["module backward", "glue backward", "module hook", "glue hook"],
    stage=range(STAGES),
    microbatch=range(CHUNKS),
    how=["forward_backward", "call"],
)
def test_a_failure_in_backward_reaches_the_caller(
    kept: Kept, schedule: str, error: Any, what: str, stage: int, microbatch: int, how: str
) -> None:
    """An exception of any kind in a custom backward or a tensor hook reaches the caller, who can go
    on."""
    with kept.made(schedule) as (bomb, net, plain, pipe):
        bomb.arm(what, stage, microbatch, error)
        found = catch(error, lambda: step(pipe, bomb, how))
        assert_says_where(found, "backward", stage, microbatch)
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
def test_after_a_failure_another_lane_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second stage fails, the first one ends the micro-batch that it is at, and stops."""
    bomb, net, plain, pipe = make("gpipe")
    second_is_under_way, has_failed, armed = (threading.Event() for _ in range(3))
    failed, begun = LaneThreads.fail, []

    def fail(self: LaneThreads, error: BaseException) -> None:
        failed(self, error)
        has_failed.set()

    def visit(place: str, stage: int, microbatch: int | None) -> None:
        if not armed.is_set():
            return
        here = place, stage, microbatch
        begun.append(here)
        if here == ("module", 1, 0):
            assert second_is_under_way.wait(20)
            raise ValueError("boom")
        if here == ("module", 0, 1):
            second_is_under_way.set()
            assert has_failed.wait(20)

    monkeypatch.setattr(LaneThreads, "fail", fail)
    monkeypatch.setattr(bomb, "visit", visit)
    step(pipe, bomb, "forward_backward")  # in the first step stages take turns: they may draw
    armed.set()
    since = time.monotonic()
    catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
    assert time.monotonic() - since < 60, "the first stage waited until the test's time was over"
    armed.clear()
    assert {microbatch for _, _, microbatch in begun} == {0, 1}
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
    armed = threading.Event()  # no plain value, which would be a reason to record anew

    def visit(place: str, stage: int, microbatch: int | None) -> None:
        if armed.is_set() and (place, stage, microbatch) == ("module", 1, 0):
            assert second_is_under_way.wait(20)
            raise ValueError("boom first")
        if armed.is_set() and (place, stage, microbatch) == ("module", 0, 1):
            second_is_under_way.set()
            assert first_has_failed.wait(20)
            raise ValueError("boom second")

    monkeypatch.setattr(bomb, "visit", visit)
    step(pipe, bomb, "forward_backward")  # in the first step stages take turns: they may draw
    net.zero_grad()
    armed.set()
    found = catch(ValueError, lambda: step(pipe, bomb, "forward_backward"))
    assert str(found) == "boom first"
    armed.clear()
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
    bomb.disarm()
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
    bomb.disarm()
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


@each_value(
    schedule=SCHEDULES,
    error=ERRORS,
)
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
