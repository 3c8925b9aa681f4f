"""What the outputs of micro-batches become."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            out = self.b(h)
            return out, (out > 0).sum(), h.mean(0)


@pytest.mark.parametrize(("chunks", "samples"), [(4, 1), (1, 1), (1, 8)])
def test_the_outputs_of_one_micro_batch_are_the_models_own(chunks: int, samples: int) -> None:
    """There is nothing to join, so that what is a list otherwise is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "chunks=1")
        pipe = bp.Pipeline(Counts(), devices=stages(2), chunks=chunks)
        out, count, mean = pipe(torch.randn(samples, 4))
    assert (tuple(out.shape), tuple(count.shape), tuple(mean.shape)) == ((samples, 3), (), (4,))


@pytest.mark.parametrize("samples", [1, 8])
def test_outputs_that_are_not_joined_are_a_list_of_one_micro_batch_too(samples: int) -> None:
    """Then the type does not depend on the size of the batch."""
    dims = {"output": None}
    pipe = bp.Pipeline(Counts(), devices=stages(2), chunks=4, batch_dims=dims)
    outputs = pipe(torch.randn(samples, 4))
    assert isinstance(outputs, list)
    assert [len(output) for output in outputs] == [3] * min(samples, 4)
