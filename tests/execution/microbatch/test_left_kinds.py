"""What micro-batches of a step leave alike: which parameters need a gradient."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parameter_sets import every_pair
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

Sets = Callable[["Turns"], object]


class Turns(nn.Linear):
    """Sets whether its weight needs a gradient, by a count."""

    def __init__(self, sets: Sets) -> None:
        super().__init__(4, 4)
        self.sets, self.n = sets, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.sets(self)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, sets: Sets, on: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[on] = Turns(sets)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage=stage):
                x = layer(x)
        return x


def _by_method(layer: Turns) -> None:
    layer.weight.requires_grad_(layer.n % 2 == 0)


def _by_attribute(layer: Turns) -> None:
    layer.weight.requires_grad = layer.n % 3 != 0


def _freezes(layer: Turns) -> None:
    if layer.n > 2:
        layer.requires_grad_(False)


def _for_a_while(layer: Turns) -> None:
    layer.weight.requires_grad_(False)
    layer.weight.requires_grad_(True)


SETS = [_by_method, _by_attribute, _freezes]


@every_pair(sets=SETS, schedule=["1f1b", "gpipe", "zb-h1"])
def test_a_weight_that_ceases_to_need_a_gradient_where_backwards_are_late_is_refused(
    sets: Sets, schedule: str
) -> None:
    """The backward of an earlier micro-batch found what a later forward had set, silently."""
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(Net(sets, 0), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(
        StateError, match=r"the forward leaves 'layers\.0\.\w+' on stage 0 with req"
    ):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


@pytest.mark.parametrize(
    ("sets", "on", "schedule"),
    [
        *((sets, 1, "1f1b") for sets in SETS),
        *((sets, 0, "sequential") for sets in SETS),
        (_for_a_while, 0, "1f1b"),
        (_for_a_while, 1, "gpipe"),
    ],
)
def test_such_a_weight_is_the_plain_loops_elsewhere(sets: Sets, on: int, schedule: str) -> None:
    """Where each backward comes before the next forward, and where a forward leaves it as it was."""
    net = Net(sets, on)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    x = torch.randn(8, 4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    x = x.to(stages(1)[0])
    plain_step(plain, (x,), {}, x, mse_loss, 4)
    assert_same_gradients(net, plain)
