"""What a recording sees of the calls of a forward."""

import ctypes
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import RecordingError

from ...stage_devices import stages


def without_weights(layer: nn.Module, h: Tensor) -> Tensor:
    return F.relu(h)


class Swaps(nn.Module):
    """Gives a class another method for a while."""

    def __init__(self, owner: type, name: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.owner, self.name, self.replacement = owner, name, without_weights

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            with mock.patch.object(self.owner, self.name, self.replacement):
                x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_a_class_that_has_another_forward_for_a_while_is_refused(schedule: str):
    """Attack 21: a step called the one that the class had before, without a word."""
    net = Swaps(nn.Linear, "forward")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(RecordingError, match="'a', of whose class Linear the forward, or __call__"):
        pipe(torch.randn(8, 4))


class Called(nn.Linear):
    """Calls another forward by its own ``__call__``, which counts."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def test_a_class_that_is_called_in_another_way_for_a_while_is_refused():
    net = Swaps(Called, "__call__")
    net.a = Called(4, 4)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return nn.Module.__call__(layer, x) * 3

    net.replacement = call
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(RecordingError, match="'a', of whose class Called the forward, or __call__"):
        pipe(torch.randn(8, 4))


class Views(nn.Module):
    """It keeps views that do not begin where the memory does, and hands them to numpy."""

    def __init__(self, read: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read
        self.register_buffer("base", torch.arange(8.0))
        self.part, self.rows = self.base[2:6], self.a.weight.data[1:3]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.read(self, x)
        with bp.Block(stage=1):
            return self.b(h)


READS: list[Callable[[Any, Tensor], float]] = [
    lambda s, x: float(s.part.numpy().sum()),
    lambda s, x: float(np.asarray(s.part)[0]),
    lambda s, x: float(np.from_dlpack(s.part)[0]),
    lambda s, x: float(s.rows.numpy().sum()),
    lambda s, x: float(x[1:].numpy().sum()),
    lambda s, x: ctypes.c_float.from_address(s.base.data_ptr()).value,
]


@pytest.mark.parametrize("read", READS)
def test_numpy_is_given_no_memory_that_is_not_there(read: Callable[[Any, Tensor], float]) -> None:
    """The address of a fake tensor's part is no null: the process ended."""
    recording = bp.record(Views(read), torch.randn(4, 4))
    assert recording.why_real is not None
    assert recording.num_stages == 2
