"""What a stage keeps on its device beside its offloaded activations, as the report has it."""

import pytest
import torch
from torch import nn

import blockpipe as bp

from ..stage_devices import is_simulated, stages

if not is_simulated():
    pytest.skip("needs an asynchronous device: --simulated", allow_module_level=True)


def _pipe(chunks: int, **options: object) -> tuple[bp.Pipeline, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.1, batch_first=True)
    net = bp.begin_blocks(nn.Sequential(layer, nn.Linear(64, 8), nn.Linear(8, 8)), {"1": 1, "2": 2})
    devices = [stages(3)[0], "cpu", "cpu"]
    pipe = bp.Pipeline(net, devices=devices, chunks=chunks, schedule="gpipe", **options)
    return pipe, torch.randn(8 * chunks, 64, 64)


def test_inputs_and_what_crosses_stay_for_every_micro_batch_in_flight(monkeypatch):
    """They were not in the prediction, which was the same for any number of micro-batches."""
    monkeypatch.setattr("blockpipe.crossing.offload.SMALLEST", 0)
    predicted, allocated = [], []

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        seen.append(torch.accelerator.memory_allocated(0))
        return outputs.square().mean()

    for chunks in (2, 6):
        pipe, x = _pipe(chunks, offload=True)
        seen: list[int] = []
        for _ in range(2):
            pipe.forward_backward(x, loss_fn=loss)
        predicted.append(pipe.memory(x).stages[0].activations)
        allocated.append(seen[-1])
    one = 8 * 64 * 64 * 4
    assert predicted[1] - predicted[0] == 4 * (one + one)  # the input, and the layer's output
    assert abs(allocated[1] - allocated[0] - 8 * one) < one


def test_nothing_is_suggested_of_activations_that_are_away():
    """Recomputation was, with less than nothing as its result."""
    notes = []
    for options in ({}, {"offload": True}):
        pipe, x = _pipe(8, **options)
        notes.append([note for note in pipe.memory(x).suggestions if "checkpoint=True" in note])
    assert len(notes[0]) == 1
    assert not notes[1]
