"""Hooks of all modules in a pipeline over processes; here it is one with two stages."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as of_all

import blockpipe as bp

from ..ranks import NEEDS_SCHEDULES
from .test_watched_model import assert_like_plain, pipe_of

pytestmark = [
    pytest.mark.cpu("the processes have no simulated accelerator"),
    NEEDS_SCHEDULES,
]


class Net(nn.Module):
    """A layer that lies on one stage as a whole, a model around both, and a hook of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
        self.second.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            h = self.first(x)
        with bp.Block(1):
            return self.second(h)


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _more_before(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    return args[0] * 1.5


def _more_after(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 1.5


HOOKS = [
    (of_all.register_module_forward_pre_hook, _more_before),
    (of_all.register_module_forward_hook, _more_after),
]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("register", "hook"), HOOKS)
def test_a_hook_of_all_modules_when_modules_are_replayed_acts_once(
    register: Callable[..., Any], hook: Callable[..., Any], later: bool
) -> None:
    """Also around the model, and no more once it is removed."""
    model = Net()
    plain = copy.deepcopy(model)
    handle = None if later else register(hook)
    pipe = pipe_of(model)
    try:
        assert_like_plain(pipe, plain)
        handle = handle or register(hook)
        assert_like_plain(pipe, plain)
    finally:
        if handle is not None:
            handle.remove()
    assert_like_plain(pipe, plain)


def test_a_hook_of_all_modules_when_it_keeps_a_log_is_called_in_each_micro_batch() -> None:
    """A stage calls such hooks itself, with the keyword arguments, and not its recording."""
    model, log = Net(), list[str]()

    def note(module: nn.Module, args: object, kwargs: object, output: Tensor) -> None:
        if isinstance(module, nn.Tanh):
            log.append(str(kwargs))

    handle = of_all.register_module_forward_hook(note, with_kwargs=True)
    try:
        pipe = pipe_of(model)
        log.clear()
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    finally:
        handle.remove()
        of_all._global_forward_hooks_with_kwargs.pop(handle.id)  # torch leaves it
    assert log == ["{}", "{}"]
