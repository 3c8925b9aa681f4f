"""Results that are the object that an operation was given, and functions of torch's by name."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

Same = Callable[[Tensor], Tensor]
X = torch.randn(8, 4)


class Asks(nn.Module):
    """Asks on stage 1 whether an operation on a tensor of stage 0 returns it as it is."""

    def __init__(self, same: Same) -> None:
        super().__init__()
        self.a, self.b, self.same = nn.Linear(4, 4), nn.Linear(4, 4), same

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            k = self.same(h)
            h = self.b(h) * (3 if k is h else 1)
        with bp.Block(stage=0):
            return h + k


SAME: dict[str, Same] = {
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(h.dtype),
    "float": lambda h: h.float(),
    "in place": lambda h: h.mul_(2),
    "in place, again": lambda h: h.mul_(2).add_(1),
    "written": lambda h: h.mul_(2).contiguous(),
    "another": lambda h: h.clone(),
}


@pytest.mark.every
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("how", SAME)
def test_a_tensor_that_crossed_when_an_operation_returns_it_is_the_same_object(
    how: str, *, isolate: bool
) -> None:
    """The result was the copy on the stage that asks."""
    net = Asks(SAME[how])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, isolate=isolate)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


class SetsRandomState(Asks):
    """Draws the same numbers for two tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            state = torch.get_rng_state()
            h = self.a(x) + torch.rand(x.shape).to(x.device)
            torch.set_rng_state(state)
            h = h * torch.rand(x.shape).to(x.device)
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_state_of_torchs_generator_when_a_forward_sets_it_is_no_change_of_its_own(
    schedule: str,
) -> None:
    """``torch.set_rng_state`` is another function while a recording runs: it was taken for a
    function that the forward had replaced."""
    nets = [SetsRandomState(lambda h: h)]
    nets.append(copy.deepcopy(nets[0]))
    for net, option in zip(nets, (schedule, "sequential"), strict=True):
        torch.manual_seed(0)
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=option)
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert_same_gradients(*nets)
