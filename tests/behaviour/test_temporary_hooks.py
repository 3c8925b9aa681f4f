"""Hooks of modules that the forward registers for a part of its own duration."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.modules.module import RemovableHandle, register_module_forward_hook

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)


def _doubled(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * 2


class Layers(nn.Module):
    """Three layers on three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                x = self.layer(i, layer, x)
        return x

    def layer(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class Steered(Layers):
    """All of the forward runs under a hook."""

    def __init__(self, register: Callable[[nn.ModuleList], RemovableHandle]) -> None:
        super().__init__()
        self.register = register

    def forward(self, x: Tensor) -> Tensor:
        handle = self.register(self.layers)
        try:
            return super().forward(x)
        finally:
            handle.remove()


class SteeredOnOneStage(Layers):
    """The second layer has a hook while its own stage runs it."""

    def layer(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        if i != 1:
            return layer(x)
        handle = self.layers[1][0].register_forward_hook(_doubled)
        h = layer(x)
        handle.remove()
        return h


class Others(Layers):
    """The first stage gives the second one's layer a hook, and each forward another one."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.layers[1][0].register_forward_hook(_doubled)

    def layer(self, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        if i == 0:
            self.handle.remove()
        h = layer(x)
        if i == 2:
            self.handle = self.layers[1][0].register_forward_hook(_doubled)
        return h


REFUSED = {
    "of a layer": (
        lambda: Steered(lambda layers: layers[1].register_forward_hook(_doubled)),
        r"layers\.1\._forward_hooks, and sets it on hops \[0, 2\] \(.*_hooks\.py",
    ),
    "inside of one": (
        lambda: Steered(
            lambda layers: layers[1][0].register_forward_pre_hook(lambda module, args: args)
        ),
        r"layers\.1\.0\._forward_pre_hooks",
    ),
    "of all modules": (
        lambda: Steered(lambda layers: register_module_forward_hook(_doubled)),
        r"the hooks of all modules \(register_module_forward_hook.* on hops \[0, 2\]",
    ),
    "of another stage's": (Others, r"layers\.1\.0\._forward_hooks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hook_that_several_stages_run_under_is_refused(case: str) -> None:
    """Other micro-batches ran it too, or none did."""
    make, what = REFUSED[case]
    pipe = bp.Pipeline(make(), devices=stages(3), chunks=4)
    with pytest.raises(StateError, match=rf"{what}.*register hooks around the whole step"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _same_as_plain(net: nn.Module, **options: Any) -> None:
    plain = copy.deepcopy(net)
    with bp.Pipeline(net, devices=stages(3), chunks=4, **options) as pipe:
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def test_a_hook_that_one_stage_registers_and_removes_gives_the_plain_loops_numbers() -> None:
    _same_as_plain(SteeredOnOneStage())


def test_a_hook_around_all_stages_gives_the_plain_loops_numbers_when_sequential() -> None:
    steered = Steered(lambda layers: layers[1].register_forward_hook(_doubled))
    _same_as_plain(steered, schedule="sequential")
