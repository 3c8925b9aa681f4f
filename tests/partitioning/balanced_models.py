"""Models and helpers of several test files."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


def chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Skips(nn.Module):
    """What early layers make is read by late ones; one layer is called twice, one weight is tied."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(self.layers[0](x))
        b = self.layers[1](a).tanh()
        c = self.norm(self.layers[2](b) + a)
        d = self.layers[3](c) * b
        e = self.layers[4](d) + x
        return F.linear(self.layers[5](e + a), self.layers[0].weight)
