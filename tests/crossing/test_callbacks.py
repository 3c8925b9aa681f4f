"""Functions of torch that call one of the user's."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_trains_as_plain
from ..stage_devices import stages

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.ones(8, 4)


class Net(nn.Module):
    """Its second stage computes a distance with what the first one has left."""

    def __init__(self, distance: Callable[["Net", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.distance = nn.Linear(4, 4), nn.Linear(4, 4), distance
        self.register_buffer("scale", torch.ones(()))
        self.left, self.table = torch.zeros(4), {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            self.leave(h)
        with bp.Block(stage=1):
            h = self.second(h)
            parts = h, h.flip(1), h.roll(1, 0)
            return h + F.triplet_margin_with_distance_loss(
                *parts, distance_function=lambda a, b: self.distance(self, a, b), margin=9.0
            )

    def leave(self, h: Tensor) -> None:
        """Leave something for the second stage."""


class LeavesBuffer(Net):
    def leave(self, h: Tensor) -> None:
        self.scale.mul_(1.1)  # type: ignore[operator]


class LeavesEntry(Net):
    def leave(self, h: Tensor) -> None:
        self.table["scale"] *= 1.1


class LeavesTensor(Net):
    def leave(self, h: Tensor) -> None:
        self.left = h.detach().mean(0)


class LeavesGradient(Net):
    def leave(self, h: Tensor) -> None:
        self.left = h.mean(0)


def plain(net: Net, a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=1)


def by_buffer(net: Net, a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=1) * net.scale


def by_entry(net: Net, a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=1) * net.table["scale"]


def by_tensor(net: Net, a: Tensor, b: Tensor) -> Tensor:
    return (a - b * net.left).norm(dim=1)


@pytest.mark.parametrize(("kind", "distance"), [(LeavesBuffer, by_buffer), (LeavesEntry, by_entry)])
def test_state_that_a_distance_reads_counts(
    kind: type[Net], distance: Callable[[Net, Tensor, Tensor], Tensor]
) -> None:
    pipe = bp.Pipeline(kind(distance), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="scale"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


@pytest.mark.parametrize(
    ("kind", "distance"),
    [(Net, plain), (Net, by_buffer), (LeavesTensor, by_tensor), (LeavesGradient, by_tensor)],
)
def test_a_distance_reads_what_is_its_micro_batchs(
    kind: type[Net], distance: Callable[[Net, Tensor, Tensor], Tensor]
) -> None:
    """What crossed was read as it was there, and its gradient went back by another graph."""
    net = kind(distance)
    reference = copy.deepcopy(net)
    try:
        assert_trains_as_plain(net, reference, X, Y)
    except StateError as error:  # another micro-batch came in between
        assert "belongs to micro-batch" in str(error)


def test_an_entry_that_a_distance_of_the_loss_reads_counts() -> None:
    net = LeavesEntry(plain)
    loss = nn.TripletMarginWithDistanceLoss(
        distance_function=lambda a, b: (a - b).norm(dim=1) * net.table["scale"]
    )
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="scale"):
        pipe.forward_backward(X, target=Y, loss_fn=lambda o, y: loss(o, y, y.roll(1, 0)))
