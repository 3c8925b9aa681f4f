"""The note on a failed micro-batch: where it was, and what to do."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ...stage_devices import stages


class Running(nn.Module):
    """Divides by a running mean that each forward writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.mean.mul_(0.9).add_(0.1 * h.detach().abs().mean())
            h = h / self.mean
        with bp.Block(stage=1):
            return self.b(h)


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def test_a_buffer_that_is_written_before_its_backward_has_a_note_with_the_remedy() -> None:
    """The plain loop runs each backward before the next forward writes; one by one it works."""
    options = {"devices": stages(2), "chunks": 4}
    pipe = bp.Pipeline(Running(), schedule="gpipe", **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as failed:
        pipe.forward_backward(torch.randn(8, 4), loss_fn=_loss)
    notes = "\n".join(failed.value.__notes__)
    assert "in the backward of micro-batch" in notes
    assert "on stage 0" in notes
    assert "clone() the value before it is used" in notes
    pipe = bp.Pipeline(Running(), schedule="sequential", **options)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=_loss)
