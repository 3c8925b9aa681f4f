"""Where parameters and buffers live, and where they came from."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.weights import placement
from blockpipe.weights.placement import Placement

from ..stage_devices import stages


class Net(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            x = self.a(x)
        with bp.Block(1):
            return self.b(x)


@pytest.mark.parametrize("replaced", ["module", "parameter"])
def test_replaced_parameters_are_not_kept(replaced: str):
    """A pipeline holds no parameter that has been taken out of its model."""
    net, x = Net(), torch.ones(4, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    seen = []
    for _ in range(4):
        if replaced == "module":
            net.b = nn.Linear(4, 4)
        else:
            net.b.weight = nn.Parameter(torch.eye(4))
        seen.append(weakref.ref(net.b.weight))
        net.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    gc.collect()
    assert [ref() is not None for ref in seen] == [False, False, False, True]


def test_a_parameter_that_was_taken_out_is_moved_back(monkeypatch: pytest.MonkeyPatch):
    """What was in the model, is out of it, or was and is in it again, goes where it came from."""
    net, x = Net(), torch.ones(4, 4)
    recording, placed = bp.record(net, x), Placement(net, stages(2))
    a, b, other = net.a, net.b, nn.Linear(4, 4)
    placed.place(recording)
    net.a, net.b = nn.Linear(4, 4), other
    placed.place(recording)
    net.b = b
    placed.place(recording)
    moved = {}
    monkeypatch.setattr(placement, "_to", lambda tensor, device: moved.update({tensor: device}))
    placed.unplace()
    parameters = [*net.parameters(), *a.parameters(), *other.parameters()]
    assert moved == dict.fromkeys(parameters, torch.device("cpu"))
