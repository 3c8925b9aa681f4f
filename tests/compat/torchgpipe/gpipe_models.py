"""Models and helpers of several test files."""

from typing import Any

from torch import nn

from blockpipe.compat.torchgpipe import (
    GPipe,
)

from ...stage_devices import stages

MODES = ["never", "always", "except_last"]


def gpipe(net: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    return GPipe(net, balance, devices=stages(len(balance)), **options)


def layers(norm: bool = False) -> nn.Sequential:
    normed = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *normed, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
