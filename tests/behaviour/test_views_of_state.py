"""Views of what a forward writes in place: they cross, and the next micro-batch writes behind them."""

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.arange(32.0).view(8, 4) / 32
Shown = Callable[[Tensor], Tensor]


class Running(nn.Module):
    """The first stage keeps a running mean, and the second one reads what ``show`` makes of it."""

    def __init__(self, show: Shown, *, writes: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.show, self.writes = nn.Linear(4, 4), nn.Linear(4, 4), show, writes
        self.register_buffer("mean", torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.own = [torch.ones(4)]

    def kept(self, x: Tensor) -> Tensor:
        return self.mean

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h, kept = self.a(x), self.kept(x)
            if self.writes:
                with torch.no_grad():
                    kept.mul_(0.5).add_(h.detach().mean(0))
            shown = self.show(kept)
        with bp.Block(stage=1):
            time.sleep(0.002)
            return self.b(h) + shown


class OfParameter(Running):
    def kept(self, x: Tensor) -> Tensor:
        return self.frozen


class OfWeight(Running):
    def kept(self, x: Tensor) -> Tensor:
        return self.scale


class OfList(Running):
    def kept(self, x: Tensor) -> Tensor:
        return self.own[0]


SHOWN: dict[str, Shown] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "entry": lambda t: t[None],
    "slice": lambda t: t[:4],
    "view": lambda t: t.view(t.shape),
    "transposed": lambda t: t.t().t(),
    "expanded": lambda t: t.expand(2, *t.shape).unbind()[0],
    "split": lambda t: t.split(4)[0],
}


def _step(net: nn.Module, schedule: str = "1f1b") -> torch.Tensor:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    return pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss


@pytest.mark.parametrize("kind", [Running, OfParameter, OfWeight, OfList])
@pytest.mark.parametrize("show", SHOWN)
def test_a_view_of_what_the_forward_writes_is_refused(kind: type[Running], show: str) -> None:
    with pytest.raises(StateError, match=r"hops \[0, 1\]"):
        _step(kind(SHOWN[show]))


def test_the_error_has_the_line_that_reads_the_view_and_the_remedy() -> None:
    with pytest.raises(StateError, match=r"a view of it at .*test_views_of_state.*view\.clone\(\)"):
        _step(Running(SHOWN["entry"]))


@pytest.mark.parametrize("show", SHOWN)
@pytest.mark.parametrize("writes", [True, False])
def test_a_clone_crosses_as_in_the_plain_loop(show: str, writes: bool) -> None:
    """So does a view, if nobody writes."""
    view = SHOWN[show]
    net = Running((lambda t: view(t).clone()) if writes else view, writes=writes)
    plain = copy.deepcopy(net)
    expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_close(_step(net), expected)
    assert_close(net.mean, plain.mean)
    assert_same_gradients(net, plain)


def test_one_micro_batch_at_a_time_may_read_the_view() -> None:
    net = Running(SHOWN["entry"])
    expected = plain_step(copy.deepcopy(net), (X,), {}, X, mse_loss, 4)
    assert_close(_step(net, "sequential"), expected)


class ReturnsView(Running):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with bp.Block(stage=0):
            h = self.a(x)
            self.mean.mul_(0.5)
            shown = self.mean[None]
        with bp.Block(stage=1):
            return self.b(h), shown


def test_a_view_that_the_forward_returns_is_read_at_its_end() -> None:
    pipe = bp.Pipeline(ReturnsView(SHOWN["entry"]), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="'mean' is written by the forward and read on hops"):
        pipe.forward_backward(X, target=X, loss_fn=lambda o, t: mse_loss(o[0] + o[1], t))


class Seldom(Running):
    """Writes for some data."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if h.detach().mean() > 1e6:
                self.mean.mul_(0.5)
            shown = self.show(self.mean)
        with bp.Block(stage=1):
            return self.b(h) + shown


def test_a_write_in_a_branch_that_data_choose_is_refused_as_well() -> None:
    with pytest.raises(StateError, match="'mean'"):
        _step(Seldom(SHOWN["entry"]))


class Later(Running):
    """Shows the mean itself for some data, of which the recording has none."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.mean.mul_(0.5)
            shown = self.show(self.mean) if x.mean() > 1.0 else torch.zeros(4, device=h.device)
        with bp.Block(stage=1):
            return self.b(h) + shown


@pytest.mark.parametrize("show", SHOWN)
def test_a_view_that_no_recording_shows_is_refused_when_it_is_read(show: str) -> None:
    net = Later(SHOWN[show])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    with pytest.raises(
        StateError, match=r"'mean' is written by the forward on stage 0, and a view"
    ):
        pipe.forward_backward(X + 3.0, target=X, loss_fn=mse_loss)
