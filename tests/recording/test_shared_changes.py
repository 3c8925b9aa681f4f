"""Changes of modules that several stages call."""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..models import square
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


class Rotary(nn.Module):
    """Makes its table anew for a longer sequence."""

    cos: Tensor | None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.most, table = 0, None
        if kind == "full buffer":
            self.most, table = 4, self.table(4, torch.device("cpu"))
        if kind == "attribute":
            self.cos = None
        else:
            self.register_buffer("cos", table, persistent=False)

    def table(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).outer(torch.arange(8, device=device)).cos()

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > self.most:
            self.cos, self.most = self.table(x.size(1), x.device), x.size(1)
        return x * self.cos[: x.size(1)]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rotary = Rotary(kind)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage=stage):
                x = self.rotary(layer(x))
        return x


@pytest.mark.parametrize("kind", ["attribute", "buffer", "full buffer"])
def test_a_shared_table_may_grow_in_the_first_evaluation(kind: str):
    """Attack 21: it might at the first step, and in later ones, but not in the first call of
    another mode, where it takes the place of a table."""
    net = Net(kind)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    for length in (4, 8, 4, 16):
        x = torch.randn(6, length, 8)
        if length == 8:
            pipe.eval()
            plain.eval()
            with torch.no_grad():
                assert_close(pipe(x), plain(x.to(DEVICE)))
            continue
        pipe.train()
        plain.train()
        loss = pipe.forward_backward(x, loss_fn=square).loss
        assert_close(loss, plain_step(plain, (x.to(DEVICE),), {}, None, square, 3))
    assert_same_gradients(net, plain)


def _in_another_directory() -> None:
    with contextlib.chdir("/"):
        os.listdir(".")


def _in_another_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


def _with_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    torch.set_num_threads(before)


class SetsBack(nn.Module):
    """Sets something of the process's and sets it back, without an operation meanwhile."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.change()
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize("change", [_in_another_directory, _in_another_dtype, _with_one_thread])
def test_a_setting_that_is_set_back_before_the_next_operation_is_refused(change: Any):
    """Attack 24: only operations looked, and another stage ran under it."""
    pipe = bp.Pipeline(SetsBack(change), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(StateError, match="the forward changes .*, and runs under it"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)


class Centred(nn.Module):
    """One stage reads the running statistics of a norm that runs on the other one."""

    def __init__(self, reads_on: int) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.reads_on = reads_on

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage):
                x = layer(x)
                is_read = stage == self.reads_on
                x = x - self.norm.running_mean if is_read else self.norm(x)
        return x


@pytest.mark.parametrize("reads_on", [0, 1])
def test_running_statistics_when_another_stage_reads_them_are_refused(reads_on: int) -> None:
    """On the earlier stage, where the norm has an alias of them: other numbers, silently."""
    pipe = bp.Pipeline(Centred(reads_on), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"'norm\.running_mean'.*on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class Hooks(nn.Module):
    """One stage hooks a module that the other one calls: each second time, or once for all."""

    def __init__(self, *, toggles: bool) -> None:
        super().__init__()
        self.a, self.b, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()
        self.toggles, self.handle = toggles, None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            if self.handle is None:
                self.handle = self.end.register_forward_hook(lambda _, __, output: 2 * output)
            elif self.toggles:
                self.handle.remove()
                self.handle = None
        with bp.Block(stage=1):
            return self.end(self.b(x))


def test_a_hook_that_the_next_forward_removes_is_refused() -> None:
    """Only hooks that one forward registers and removes were: other numbers, silently."""
    pipe = bp.Pipeline(Hooks(toggles=True), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes end\._forward_hooks"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


def test_a_hook_that_the_first_forward_registers_for_good_is_fine() -> None:
    net = Hooks(toggles=False)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        x = torch.randn(8, 4)
        pipe.forward_backward(x, loss_fn=square)
        plain_step(plain, (x.to(stages(1)[0]),), {}, None, square, 4)
    assert_same_gradients(net, plain)
