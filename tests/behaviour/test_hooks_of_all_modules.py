"""Hooks that every module calls (``register_module_forward_hook``): as a module's own hooks."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.modules.module import RemovableHandle

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

Register = Callable[[Any], RemovableHandle]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)


@contextmanager
def _hooked(register: Register, hook: Callable[..., object]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


class Shares:
    """The first stage counts, and the second one computes with the count."""

    def __init__(self, net: Two) -> None:
        self.first, self.second, self.count = net.a, net.b, 0

    def before(self, module: nn.Module, args: tuple[Tensor, ...]) -> object:
        if module is self.first:
            self.count += 1
        return (args[0] * self.count,) if module is self.second else None

    def after(self, module: nn.Module, args: object, output: Tensor) -> object:
        if module is self.first:
            self.count += 1
        return output * self.count if module is self.second else None

    def backward(self, module: nn.Module, *gradients: Any) -> object:
        if module is self.second:
            self.count += 1
        return None if module is self.second else (gradients[0][0] * self.count,)


KINDS = [
    (of_all.register_module_forward_pre_hook, Shares.before),
    (of_all.register_module_forward_hook, Shares.after),
    (of_all.register_module_full_backward_hook, Shares.backward),
    (of_all.register_module_full_backward_pre_hook, Shares.backward),
]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("register", "hook"), KINDS)
def test_a_hook_of_all_modules_when_stages_share_its_state_is_refused(
    register: Register, hook: Callable[..., object], later: bool
) -> None:
    """Each step was wrong, without a word: nobody looked at such hooks, or noticed new ones."""
    net = Two()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    if later:
        pipe.forward_backward(x, loss_fn=torch.sum)
    with (
        _hooked(register, hook.__get__(Shares(net))),
        pytest.raises(StateError, match=r"'count' of a Shares.* .*on hops .*reads it"),
    ):
        pipe.forward_backward(x, loss_fn=torch.sum)


def _doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_a_hook_of_all_modules_when_it_shares_nothing_runs_as_in_the_plain_loop(
    schedule: str,
) -> None:
    net = Two()
    plain, loss_fn = copy.deepcopy(net), nn.functional.mse_loss
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for step in range(4):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        handle = of_all.register_module_forward_hook(_doubled) if step % 2 else None
        try:
            found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
            assert_close(found.loss, plain_step(plain, (x,), {}, y, loss_fn, 4))
        finally:
            if handle is not None:
                handle.remove()
    assert_same_gradients(net, plain)
