"""Models and helpers of several test files."""

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp


class Shared:
    """State that modules on two stages share."""

    def __init__(self) -> None:
        self.value = 1.0


class _Writes(nn.Linear):
    """Long after the stage before has read for the next micro-batch: a race that is always lost."""

    shared: Shared

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        self.shared.value = float(x.detach().abs().max())
        return super().forward(x)


class Reads(nn.Linear):
    shared: Shared

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared.value


def sharing(shared: Any) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), Reads(8, 8), nn.ReLU(), _Writes(8, 4))
    net[1].shared = net[3].shared = shared
    return bp.begin_blocks(net, {"2": 1})


class WrongBehind(torch.autograd.Function):
    """Right in the plain loop, wrong in a thread of the pipeline's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_plain = threading.current_thread() is threading.main_thread()
        return gradient if is_plain else gradient * 1.5


class Wrong(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(WrongBehind.apply(x))
