"""A model whose first stage sets an entry, for tests of how its second one comes to read it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

CALM = torch.linspace(-1, 1, 32).view(8, 4)
Y = torch.ones(8, 4)


class Tailed(nn.Module):
    """The first stage sets an entry; the second one ends with a function of the test's, which is
    given the model, the input and what the second layer has made of it."""

    def __init__(self, tail: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self._tail = nn.Linear(4, 4), nn.Linear(4, 4), tail
        self.table = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            self.table["scale"] = self.table["scale"] * 0.9 + 0.1 * h.detach().mean().item()
        with bp.Block(stage=1):
            return self._tail(self, x, self.second(h))
