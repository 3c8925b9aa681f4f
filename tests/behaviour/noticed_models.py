"""Models and helpers of several test files."""

import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages


def _pipe(net: nn.Module, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=4, **options)


# --- writes


class Averages(nn.Module):
    """``k`` follows ``q`` on stage 0, every so many forwards, and is read on both stages."""

    def __init__(self, how: str, every: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how, self.every, self.calls = how, every, [0]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.calls[0] % self.every == self.every - 1:
                with torch.no_grad():
                    if self.how == "in place":
                        self.k.weight.lerp_(self.q.weight, 0.1)
                    else:
                        self.k.weight.data = 0.9 * self.k.weight + 0.1 * self.q.weight
            self.calls[0] += 1
            h = self.q(x) * self.k(x)
        with bp.Block(stage=1):
            return self.k(h)
