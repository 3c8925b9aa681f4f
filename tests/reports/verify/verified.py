"""Models and helpers of several test files."""

import threading
from typing import Any

import torch
from torch import Tensor, nn


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
