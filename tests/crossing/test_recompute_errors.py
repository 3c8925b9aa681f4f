"""Recomputations that fail where the forward did not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages


class Cache:
    """Keeps what layers add to it, out of anybody's sight, as a key-value cache does."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def add(self, key: int, x: Tensor) -> Tensor:
        before = self.kept.get(key)
        self.kept[key] = x if before is None else torch.cat([before, x], 1)
        return self.kept[key]


class Layer(nn.Module):
    """Adds to the cache, and needs it to be as long as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        return self.down(torch.tanh(self.up(cache.add(0, x) + mask)))


class Net(nn.Module):
    """Two stages; a cache for each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            x = self.a(x, torch.zeros_like(x), Cache())
        with bp.Block(1):
            return self.b(x)


def test_a_cache_that_the_forward_fills_is_named_when_its_recomputation_fails():
    """The error is the forward's own, with a note on the likely cause and what to do."""
    x = torch.randn(4, 3, 4)
    pipe = bp.Pipeline(Net(), devices=stages(2), chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match=r"size of tensor a \(6\)") as raised:
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    (note,) = [n for n in raised.value.__notes__ if "recomputed" in n and "use_cache" in n]
    assert note.startswith("module 'a' on stage 0 raised this when it was recomputed for micro-")
    assert "mark it with checkpoint=False" in note
