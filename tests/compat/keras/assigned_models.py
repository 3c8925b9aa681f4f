"""Models and helpers of several test files."""

import torch
from torch import nn


class Part(nn.Module):
    """Calls its children in a row, with operations of its own before and after."""

    def __init__(self, children: list[nn.Module], before: bool, after: bool) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.steps = nn.ModuleList(children)

    def forward(self, x):
        if self.before:
            x = x * 1.5
        for step in self.steps:
            x = step(x)
        return x + 0.5 if self.after else x


def net_of() -> nn.Module:
    """Named layers, one a container; unmarked."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("stem", nn.Linear(4, 4))
    net.add_module("body", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    net.add_module("head", nn.Linear(4, 2))
    return net


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
