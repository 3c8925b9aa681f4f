"""Models and helpers of several test files."""

import torch
from torch import Tensor, nn

import blockpipe as bp


class Net(nn.Module):
    """Blocks that repeat, a module that is called twice, one that spans stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.twice = nn.Linear(8, 8, bias=False)
        self.twice.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.stem(x))
        for number, block in enumerate(self.blocks):
            if number < 2:
                x = block(x)
            else:
                with bp.Block(1, name="top"):
                    x = block(x) + self.twice(x)
        return x


def recorded(net: nn.Module | None = None) -> bp.Recording:
    return bp.record(net or Net(), torch.zeros(4, 8))
