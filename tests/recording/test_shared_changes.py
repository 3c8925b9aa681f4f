"""Changes of modules that several stages call."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

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
