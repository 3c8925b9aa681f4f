"""Tensors that a step leaves on the model, when another cut reads them on another stage."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X, Y = torch.randn(10, 8), torch.randn(10, 8)
Cut = Mapping[str, int]
EARLY, LATE = {"b": 1}, {"c": 1}


class Running(nn.Module):
    """A mean that runs along with the micro-batches, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.mean = torch.zeros(8, device=stages(1)[0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).tanh()
        self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        return self.c(h - self.mean)


class Centered(nn.Module):
    """A layer with such a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.mean = torch.zeros(8, device=stages(1)[0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        return h - self.mean


class InLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), Centered(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class InPlace(Running):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).tanh()
        self.mean += h.detach().mean(0)
        return self.c(h - self.mean.clone())


class Late(Running):
    """The forward reads at its beginning what it sets at its end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) - self.mean
        h = self.b(h).tanh()
        h = self.c(h)
        self.mean = h.detach().mean(0)
        return h


class Table(Running):
    """A table that the first forward makes, and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.c(self.b(self.a(x)))
        if self.table is None:
            self.table = torch.arange(8, device=x.device) / 8
        return h + self.table


def _moves_marks(net: nn.Module, pipe: bp.Pipeline, cut: Cut) -> bp.Pipeline:
    bp.remove_blocks(net)
    bp.begin_blocks(net, cut)
    return pipe


def _makes_another(net: nn.Module, pipe: bp.Pipeline, cut: Cut) -> bp.Pipeline:
    pipe.unplace()
    bp.remove_blocks(net)
    bp.begin_blocks(net, cut)
    return bp.Pipeline(net, devices=stages(2), chunks=4)


def _balances(net: nn.Module, pipe: bp.Pipeline, cut: Cut) -> bp.Pipeline:
    bp.balance(net, X[:4], 2, by="flops")
    return _moves_marks(net, pipe, cut)


Change = Callable[[nn.Module, bp.Pipeline, Cut], bp.Pipeline]


CHANGES = [_moves_marks, _makes_another, _balances]
CUTS = [(EARLY, LATE, EARLY), (LATE, EARLY, LATE)]


def _steps(net: nn.Module, cuts: tuple[Cut, ...], change: Change) -> None:
    """Two steps on each cut, beside the plain loop's."""
    net.to(stages(1)[0])
    plain = copy.deepcopy(net)
    bp.begin_blocks(net, cuts[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for step, cut in enumerate(cuts):
        pipe = change(net, pipe, cut) if step else pipe
        for _ in range(2):
            pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss)
            plain_step(plain, (X,), {}, Y, F.mse_loss, 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_state_without_gradient_goes_with_the_cut(cuts: tuple[Cut, ...], change: Change) -> None:
    """Each change of the cut after a step ended in an error: another stage had made the mean. No
    micro-batch is under way between steps."""
    _steps(Running(), cuts, change)


@pytest.mark.cpu("a layer's plain tensors stay on one accelerator")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cuts", CUTS)
def test_a_state_of_a_layer_goes_with_the_cut(cuts: tuple[Cut, ...], change: Change) -> None:
    """The module that keeps it is called as it is."""
    _steps(InLayer(), cuts, change)


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_is_written_in_place_goes_with_the_cut_where_memory_is_one(
    change: Change,
) -> None:
    """The tensor that another stage has made is written to where it is read."""
    if stages(2)[0] != stages(2)[1]:
        with pytest.raises(StateError, match="lives elsewhere and was written in place"):
            _steps(InPlace(), CUTS[0], change)
    else:
        _steps(InPlace(), CUTS[0], change)


def test_a_measured_balance_comes_after_steps() -> None:
    """It runs the model whole, with the state that steps have left."""
    net = Running().to(stages(1)[0])
    bp.begin_blocks(net, LATE)
    pipe = bp.Pipeline(net, devices=stages(1) * 2, chunks=4)
    pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss)
    bp.balance(net, X[:4].to(stages(1)[0]), 2)


def test_a_state_that_a_cut_would_set_too_late_is_still_refused() -> None:
    """Between steps it is anybody's; within a step, the next micro-batch would miss it."""
    net = Late().to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="uncut")
    bp.begin_blocks(net, EARLY)
    pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss)
    pipe.schedule = "1f1b"
    bp.remove_blocks(net)
    bp.begin_blocks(net, LATE)
    with pytest.raises(StateError, match="the next micro-batch begins before it is set"):
        pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss)


def test_a_table_of_a_pipeline_with_more_stages_is_read_by_one_with_fewer() -> None:
    """The stage that made it is none of this pipeline's; that was an IndexError."""
    net = Table().to(stages(1)[0])
    plain = copy.deepcopy(net)
    for cut in ({"b": 1, "c": 2}, {"c": 1}):
        bp.remove_blocks(net)
        bp.begin_blocks(net, cut)
        pipe = bp.Pipeline(net, devices=stages(len(cut) + 1), chunks=4)
        pipe.forward_backward(X, target=Y, loss_fn=F.mse_loss)
        plain_step(plain, (X,), {}, Y, F.mse_loss, 4)
    assert_same_gradients(net, plain)
