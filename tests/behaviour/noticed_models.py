"""Models and helpers of several test files."""

import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages


def _pipe(net: nn.Module, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=4, **options)


# --- writes


class Averages(nn.Module):
    """``k`` follows ``q`` on stage 0 from some step on, and is read on both stages."""

    def __init__(self, how: str, warm: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how, self.warm = how, bytearray([warm])  # in which nobody looks

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.warm[0]:
                with torch.no_grad():
                    if self.how == "in place":
                        self.k.weight.lerp_(self.q.weight, 0.1)
                    else:
                        self.k.weight.data = 0.9 * self.k.weight + 0.1 * self.q.weight
            h = self.q(x) * self.k(x)
        with bp.Block(stage=1):
            return self.k(h)


class Codebook(nn.Module):
    """Is revived on stage 0, from some step on, and read on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("book", torch.ones(8))
        self.warm = bytearray([False])  # in which nobody looks

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) + self.book
            if self.warm[0]:
                self.book.mul_(0.5)
        with bp.Block(stage=1):
            return self.b(h + self.book)
