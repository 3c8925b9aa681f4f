"""What a recording sees of the calls of a forward."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import RecordingError

from ...stage_devices import stages


def without_weights(layer: nn.Module, h: Tensor) -> Tensor:
    return F.relu(h)


class Swaps(nn.Module):
    """Gives a class another method for a while."""

    def __init__(self, owner: type, name: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.owner, self.name, self.replacement = owner, name, without_weights

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            with mock.patch.object(self.owner, self.name, self.replacement):
                x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_a_class_that_has_another_forward_for_a_while_is_refused(schedule: str):
    """Attack 21: a step called the one that the class had before, without a word."""
    net = Swaps(nn.Linear, "forward")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(RecordingError, match="'a', of whose class Linear the forward, or __call__"):
        pipe(torch.randn(8, 4))


class Called(nn.Linear):
    """Calls another forward by its own ``__call__``, which counts."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def test_a_class_that_is_called_in_another_way_for_a_while_is_refused():
    net = Swaps(Called, "__call__")
    net.a = Called(4, 4)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return nn.Module.__call__(layer, x) * 3

    net.replacement = call
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(RecordingError, match="'a', of whose class Called the forward, or __call__"):
        pipe(torch.randn(8, 4))
