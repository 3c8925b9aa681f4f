"""Members of a loop that data choose, each on its own stage: experts, layers, and what counts for
them."""

import copy
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.rand(8, 4)


class Box:
    def __init__(self) -> None:
        self.value = 1.0


class Log:
    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Calm(nn.Module):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def forward(self, h: Tensor) -> Tensor:
        return h


class Wild(Calm):
    def forward(self, h: Tensor) -> Tensor:
        self.log.rows.append(1.0)
        return h


class Experts(nn.Module):
    """Hot rows go to an expert that logs, and the last stage reads how often."""

    def __init__(self, route: Callable[..., Any], rows: Any = ()) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.log, self.route = Log([*rows]), route
        self.experts = nn.ModuleList([Calm(self.log), Wild(self.log)])

    def calm(self) -> None:
        pass

    def wild(self) -> None:
        self.log.rows.append(1.0)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.route(self, x, h)
        with bp.Block(stage=1):
            time.sleep(0.001)
            h = self.b(h)
        with bp.Block(stage=2):
            return self.c(h) * (1 + 0.1 * len(self.log.rows))


def _by_mask(net: Experts, x: Tensor, h: Tensor) -> None:
    for number, expert in enumerate(net.experts):
        mask = (x[:, 0] > 2) == bool(number)
        if mask.any():
            expert(h[mask])


def _by_name(net: Experts, x: Tensor, h: Tensor) -> None:
    getattr(net, "wild" if x.max().item() > 2 else "calm")()


def _by_default(net: Experts, x: Tensor, h: Tensor) -> None:
    {True: net.wild}.get(x.max().item() > 2, net.calm)()


def _by_lambda(net: Experts, x: Tensor, h: Tensor) -> None:
    {True: lambda: net.wild(), False: lambda: None}[x.max().item() > 2]()


@pytest.mark.parametrize("route", [_by_mask, _by_name, _by_default, _by_lambda])
def test_an_expert_when_data_choose_it_later_is_refused(route: Callable[..., Any]):
    """Attack 43: a loop over experts ran the instruction, and so did the calm one alone."""
    pipe = bp.Pipeline(Experts(route), devices=stages(3), chunks=4)
    with pytest.raises(
        StateError, match=r"the forward changes a list on hops \[0\].*on hops \[2\]"
    ):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


class Bank(nn.Module):
    """Its first stage writes to a row of an array now and then, and the second one reads it."""

    def __init__(self, rare: Callable[..., None]) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.rows, self.rare = np.ones((2, 4), np.float32), rare

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.calls += 1
            self.rare(self)
        with bp.Block(stage=1):
            return self.b(h) * float(self.rows.mean())


def _row(net: Bank) -> None:
    if net.calls % 6 == 0:
        row = net.rows[1]
        row[:] = 0.5 * row + net.calls


def _unpacked_rows(net: Bank) -> None:
    if net.calls % 6 == 0:
        _, scale = net.rows
        scale *= 0.5


def _transposed(net: Bank) -> None:
    if net.calls % 6 == 0:
        columns = net.rows.T
        columns[0] += net.calls


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rare", [_row, _unpacked_rows, _transposed])
def test_an_array_when_a_later_step_writes_to_it_is_told_of(rare: Callable[..., None]):
    """Attack 45. Of an array, steps did not compare the content."""
    pipe = bp.Pipeline(Bank(rare), devices=stages(2), chunks=4)
    told = r"(changes an ndarray|ndarray was (set|written) during the step).* read"
    with pytest.raises((StateError, UserWarning), match=told):
        [pipe.forward_backward(X, target=X, loss_fn=mse_loss) for _ in range(2)]


def _hidden(net: Experts, x: Tensor, h: Tensor) -> None:
    acts = {False: "calm", True: "wild"}
    names = [acts[bool(x.max() > 2)]]
    for _ in map(operator.methodcaller(names[0]), [net]):
        pass


@pytest.mark.parametrize("rows", [(), range(40)], ids=["empty", "long"])
def test_a_list_when_a_later_step_lengthens_it_is_told_of(rows: Any):
    """No recording showed it, and what a step leaves was compared in attributes and entries."""
    pipe = bp.Pipeline(Experts(_hidden, rows), devices=stages(3), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"a list was set during the step, which it was not"):
        pipe.forward_backward(X + 4, target=X, loss_fn=mse_loss)


class Own(nn.Module):
    """What data choose is each stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList([Calm(Log([])), Wild(Log([]))])

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            for number, expert in enumerate(self.experts):
                mask = (x[:, 0] > 0.5) == bool(number)
                if mask.any():
                    h = h + expert(h) * (1 + len(expert.log.rows))
        with bp.Block(stage=1):
            return self.b(h)


def test_an_expert_when_its_stage_alone_uses_it_is_the_plain_loops():
    net = Own()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net.to(DEVICE), devices=stages(2), chunks=4)
    for step in range(3):
        plain.zero_grad()
        pipe.zero_grad()
        plain_step(plain, (X + step / 4,), {}, X, mse_loss, 4)
        pipe.forward_backward(X + step / 4, target=X, loss_fn=mse_loss)
        assert_same_gradients(net, plain)


class Counted(nn.Module):
    """Each layer has a count, by which it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), 0

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) / (1 + self.count)


class Loops(nn.Module):
    """A loop over stages, in which each layer, or an object beside it, counts for its own stage."""

    def __init__(self, turns: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.turns = nn.ModuleList(Counted() for _ in range(3)), turns
        self.boxes = [Box() for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.turns(self, x)


def _layers_count(net: Loops, x: Tensor) -> Tensor:
    for stage, layer in enumerate(net.layers):
        with bp.Block(stage=stage):
            x = layer(x)
            if x.abs().max() > 2:
                layer.count += 1
    return x


def _boxes_count(net: Loops, x: Tensor) -> Tensor:
    for stage, (layer, box) in enumerate(zip(net.layers, net.boxes, strict=True)):
        with bp.Block(stage=stage):
            if x.abs().max() < 1e9:
                x = layer(x) * box.value
                box.value += 0.5
    return x


def _by_index(net: Loops, x: Tensor) -> Tensor:
    for stage in range(3):
        with bp.Block(stage=stage):
            box, layer = net.boxes[stage], net.layers[stage]
            x = layer(x) * box.value
            if x.abs().max() > 2:
                for one in [box]:
                    one.value += 0.5
    return x


@pytest.mark.parametrize("turns", [_layers_count, _boxes_count, _by_index])
def test_a_loop_over_stages_when_each_counts_for_itself_is_the_plain_loops(
    turns: Callable[..., Tensor],
):
    """What a turn sets is set on the hop of that turn, and not on the last one."""
    net = Loops(turns)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net.to(DEVICE), devices=stages(3), chunks=4)
    for step in range(3):
        plain.zero_grad()
        pipe.zero_grad()
        plain_step(plain, (X + step,), {}, X, mse_loss, 4)
        pipe.forward_backward(X + step, target=X, loss_fn=mse_loss)
        assert_same_gradients(net, plain)


class Dropped(nn.Module):
    """LayerDrop, with a count of how often each layer was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with bp.Block(stage=number):
                if number in self.skips:
                    layer.skipped = getattr(layer, "skipped", 0) + 1
                    continue
                x = x + layer(x).tanh()
        return x


@pytest.mark.filterwarnings("ignore:nothing ran on stage:UserWarning")
def test_a_last_block_when_nothing_runs_in_it_may_count():
    """What it counts is on a hop that no operation has come to."""
    net = Dropped()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    for skips in ({1}, {2}, {1, 2}):
        net.skips, plain.skips = skips, skips
        plain.zero_grad(set_to_none=False)
        pipe.zero_grad(set_to_none=False)
        plain_step(plain, (X,), {}, X, mse_loss, 4)
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        for ours, theirs in zip(net.layers, plain.layers, strict=True):
            assert getattr(ours, "skipped", 0) == getattr(theirs, "skipped", 0)
