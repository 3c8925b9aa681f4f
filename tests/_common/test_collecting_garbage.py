"""What Python runs while it collects garbage is nothing that the forward does."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe._common.collecting_garbage import CollectingGarbage

from ..stage_devices import stages

COLLECTED = [0, 0]


def _counts(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        COLLECTED[0] += 1
        _adds(info["generation"])


def _adds(generation: int) -> None:
    COLLECTED[1] = max(COLLECTED[1], generation)


@pytest.fixture
def callback() -> Iterator[None]:
    gc.callbacks.append(_counts)
    yield
    gc.callbacks.remove(_counts)


class Counts(nn.Module):
    """Two stages with garbage, and a count of its own, so that the recording looks at its code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            h = self.a(x)
            gc.collect(0)
        with bp.Block(stage=1):
            gc.collect(0)
            return self.b(h)


def test_a_callback_when_the_forward_makes_garbage_is_fine(callback: None) -> None:
    """It was taken for the forward's, by chance: "the forward changes a list on hops [0, 1]"."""
    before, callbacks = COLLECTED[0], [*gc.callbacks]
    pipe = bp.Pipeline(Counts(), devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    assert COLLECTED[0] >= before + 4
    assert gc.callbacks == callbacks


def test_it_is_over_when_garbage_is_collected_as_it_is_entered() -> None:
    """It was taken to go on from there, and no code was looked at: other numbers, silently."""
    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 20):
            collecting = CollectingGarbage()
            gc.collect()
            gc.set_threshold(allocations, 1, 1)
            with collecting:
                gc.set_threshold(*thresholds)
                assert not collecting.now
    finally:
        gc.set_threshold(*thresholds)
