"""Copies have the strides and the alignment of what they are made of."""

import itertools

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.devices.copies import carry

from ..models import square
from ..stage_devices import stages

LAYOUTS = ["strided", "transposed", "expanded", "sliced", "empty", "0-d"]


def laid_out(kind: str, device: str) -> torch.Tensor:
    base = torch.arange(24.0, device=device).reshape(4, 6)
    return {
        "strided": base,
        "transposed": base.t(),
        "expanded": base[:, :1].expand(4, 5),
        "sliced": base[1:3, ::2],
        "empty": base[:0],
        "0-d": base.sum(),
    }[kind]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("way", list(itertools.permutations(["cpu", *stages(3)[:2]], 2)))
def test_values_and_strides_survive(kind, way):
    """From every device to every other, an expanded tensor as one."""
    source = laid_out(kind, way[0])
    moved = carry(source, torch.device(way[1]))
    assert moved.device == torch.device(way[1])
    assert torch.equal(moved.cpu(), source.cpu())
    assert (0 in moved.stride()) == (0 in source.stride())
    assert moved.untyped_storage().nbytes() <= source.untyped_storage().nbytes()


@pytest.mark.parametrize("rows", [slice(3, 6), slice(1, 1), slice(None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_copy_on_the_cpu_has_the_alignment_of_its_source(dtype, rows):
    """A product is rounded otherwise where a micro-batch begins within a line of the cache."""
    source = torch.arange(104).reshape(8, 13).to(dtype)[rows]
    copied = carry(source, torch.device("cpu"), copy=True)
    assert copied.data_ptr() % 64 == source.data_ptr() % 64
    assert copied.stride() == source.stride()
    assert torch.equal(copied, source)
    assert not copied._is_view()
    assert source.numel() == 0 or copied.data_ptr() != source.data_ptr()


def test_isolated_micro_batches_that_begin_anywhere_are_exact():
    net = bp.begin_blocks(nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3)), {"2": 1})
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3, isolate=True)
    for _ in range(8):
        assert pipe.verify(torch.randn(8, 13), loss_fn=square).ok
