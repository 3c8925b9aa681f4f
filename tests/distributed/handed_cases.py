"""What several processes run together: gradients and state that are not dense tensors."""

from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

from .cases import SCHEDULES, compare, mean_square


class Sometimes(nn.Module):
    """Layers on stages, of which the last one reads the first one's result without its gradient."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with bp.Block(number):
                if number == 0:
                    skip = x = layer(x)
                else:
                    x = layer(x.detach() if number == 1 else x) + skip.detach()
        return x


def a_stage_without_a_gradient_has_none(rank: int, ranks: int) -> None:
    """Under every schedule."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for name, per_rank in SCHEDULES.items():
        model: Any = Sometimes(ranks * per_rank)
        for layer in model.layers[1:]:
            layer.register_forward_hook(lambda module, args, result: result.tanh())
        compare(model, (x,), target=y, loss_fn=mean_square, chunks=8, schedule=name)
