"""Hooks around backwards in a pipeline over processes; here it is one with two stages."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.modules import module as of_all

from blockpipe.distributed import DistributedPipeline
from blockpipe.errors import RecordingError

from ..ranks import NEEDS_SCHEDULES
from .test_hooks_of_all import Net

pytestmark = [
    pytest.mark.cpu("the processes have no simulated accelerator"),
    NEEDS_SCHEDULES,
]


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _doubled(module: nn.Module, *gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else 2 * gradient for gradient in gradients[0])


HOOKS: list[Callable[[Any], Any]] = [
    lambda net: net.third.register_full_backward_hook(_doubled),
    lambda net: net.third.register_full_backward_pre_hook(_doubled),
    lambda net: net.third.register_backward_hook(_doubled),
]


class More(Net):
    """One layer more, that the code of the second stage calls as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(super().forward(x))
        return y


def assert_steps_alike(pipe: DistributedPipeline, plain: nn.Module) -> None:
    """Gradients are those of the plain loop."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for net in (pipe.module, plain):
        net.zero_grad()
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    mse_loss(plain(x), y).backward()
    for own, other in zip(pipe.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("schedule", ["looped-bfs", "zb-h1"])
@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_of_a_backward_when_a_stage_calls_its_module_acts_once(
    register: Callable[[Any], Any], schedule: str
) -> None:
    """Also if it comes between steps, and goes."""
    model: Any = More()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"device": "cpu", "chunks": 2, "schedule": schedule}
    handle = register(model)
    pipe = DistributedPipeline(model, sample=torch.ones(4, 4), **options)
    handle.remove()
    for is_there in (True, False, True):
        handles = [register(net) for net in (model, plain) if is_there]
        assert_steps_alike(pipe, plain)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("register", "whose"),
    [
        (lambda net: net.register_full_backward_hook(_doubled), "the model"),
        (lambda net: net.second.register_full_backward_hook(_doubled), "module 'second'"),
        (lambda net: of_all.register_module_full_backward_hook(_doubled), "all modules, and so"),
    ],
)
def test_a_hook_of_a_backward_when_no_stage_can_call_it_is_refused(
    register: Callable[[Any], Any], whose: str
) -> None:
    """Around modules that are called in parts, and beside hooks of a forward, which are replayed."""
    model = Net()
    handle = register(model)
    options: dict[str, Any] = {"device": "cpu", "chunks": 2, "schedule": "looped-bfs"}
    try:
        with pytest.raises(RecordingError, match=f"expected hooks of backwards .* on {whose}"):
            DistributedPipeline(model, sample=torch.ones(4, 4), **options)
    finally:
        handle.remove()
