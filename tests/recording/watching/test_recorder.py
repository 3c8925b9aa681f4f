"""What a recording leaves behind on devices."""

import gc

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import RecordingError

from ...models import square
from ...stage_devices import stages


class _Tied(nn.Module):
    """A weight that both stages read; it may fail on the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(6, 6), nn.Linear(6, 6), False
        self.b.weight = self.a.weight

    def forward(self, x):
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            h = self.b(h)
            if self.fails:
                raise ValueError("no")
            return h


def test_a_recording_that_fails_leaves_no_copy_in_flight():
    """The weight's memory could be used again while it was copied, if the model went then."""
    net, x = _Tied(), torch.randn(6, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    pipe.forward_backward(x, loss_fn=square)
    net.fails = True
    with pytest.raises(RecordingError, match="ValueError: no"):
        pipe.forward_backward(x, loss_fn=square)
    del net, pipe
    gc.collect()
