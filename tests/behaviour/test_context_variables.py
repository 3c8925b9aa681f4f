"""Values in what context variables hold."""

import contextvars
import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

STATS = contextvars.ContextVar[dict[str, int]]("stats")
COUNT = contextvars.ContextVar("count", default=0)


class Counts(nn.Module):
    """Counts in what a context variable holds; another stage may read it."""

    def __init__(self, *, reads_elsewhere: bool) -> None:
        super().__init__()
        self.a, self.b, self.reads_elsewhere = nn.Linear(4, 4), nn.Linear(4, 4), reads_elsewhere

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            STATS.get()["n"] += 1
            h = self.a(x) / (1 if self.reads_elsewhere else STATS.get()["n"])
        with bp.Block(stage=1):
            return self.b(h) / (STATS.get()["n"] if self.reads_elsewhere else 1)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe"])
def test_what_a_context_variable_holds_is_as_it_was_after_a_recording(schedule: str) -> None:
    """The first step counted on from the recording's count."""
    net, x = Counts(reads_elsewhere=False), torch.randn(8, 4)
    plain = copy.deepcopy(net).to(stages(1)[0])
    token = STATS.set({"n": 0})
    try:
        bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule).forward_backward(
            x, loss_fn=torch.sum
        )
        assert STATS.get()["n"] == 4
        STATS.get()["n"] = 0
        plain_step(plain, (x.to(stages(1)[0]),), {}, None, torch.sum, 4)
    finally:
        STATS.reset(token)
    assert_same_gradients(net, plain)


def test_what_a_context_variable_holds_is_refused_where_another_stage_reads_it() -> None:
    token = STATS.set({"n": 0})
    try:
        pipe = bp.Pipeline(Counts(reads_elsewhere=True), devices=stages(2), chunks=4)
        with pytest.raises(StateError, match="entry 'n' of a dict"):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    finally:
        STATS.reset(token)


LASTING = contextvars.ContextVar("lasting", default={"n": 0})  # noqa: B039 - as users do


@pytest.mark.parametrize("reads_elsewhere", [False, True])
def test_what_a_context_variable_has_by_default_is_a_value_too(
    reads_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "STATS", LASTING)
    monkeypatch.setitem(LASTING.get(), "n", 0)
    net = Counts(reads_elsewhere=reads_elsewhere)
    if reads_elsewhere:
        with pytest.raises(StateError, match="entry 'n' of a dict"):
            bp.Pipeline(net, devices=stages(2), chunks=4).forward_backward(
                torch.randn(8, 4), loss_fn=torch.sum
            )
    bp.record(net, torch.ones(2, 4))
    assert LASTING.get()["n"] == 0


def test_a_context_of_the_models_own_is_as_it_was_after_a_recording() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.context = contextvars.copy_context()

        def count(self) -> int:
            COUNT.set(COUNT.get() + 1)
            return COUNT.get()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.context.run(self.count)

    net = bp.begin_blocks(nn.Sequential(Own(), nn.Linear(4, 4)), {"1": 1})
    bp.record(net, torch.ones(2, 4))
    assert net[0].context.get(COUNT, 0) == 0
    assert net[0](torch.ones(2, 4)).shape == (2, 4)
    assert net[0].context[COUNT] == 1


RARE = contextvars.ContextVar("rare", default=1.0)


class SetsNowAndThen(nn.Module):
    """Anneals every sixth forward, and reads in each one what an earlier one has left."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.calls += 1
            if self.calls % 6 == 0:
                RARE.set(0.5 ** (self.calls // 6))
        with bp.Block(stage=1):
            return self.b(h) / RARE.get()


def test_a_variable_that_a_forward_sets_now_and_then_for_the_next_ones_is_refused():
    """Attack 45: each micro-batch has a context of its own, and read the value of before the step."""
    pipe = bp.Pipeline(SetsNowAndThen(), devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match="changes a ContextVar .* reads it"):
        pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
