"""What is said of a sample on which a forward fails."""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError, UsageError
from blockpipe.recording.sample import signature

LOGGER = "torch._subclasses.fake_tensor"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x) @ (torch.zeros(8, 8) if mask is None else mask * torch.ones(8, 8))


def pipeline(model: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(model, devices=["cpu"], **{"chunks": 4, **options})


@dataclass
class Boxes:
    corners: Tensor
    label: str


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([torch.zeros(3, 96)] * 4, "list[4 × float32[3, 96]]"),
        ((torch.zeros(2), torch.zeros(3)), "(float32[2], float32[3])"),
        ([{"boxes": torch.zeros(2, 4)}] * 2, "list[2 × {'boxes': float32[2, 4]}]"),
        (Boxes(torch.zeros(2, 4), "cat"), "Boxes(corners=float32[2, 4], label='cat')"),
        (np.zeros((4, 2)), "ndarray of float64[4, 2]"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        ((8, 16), "(8, 16)"),
    ],
)
def test_arguments_are_shown_by_shape(value: Any, shown: str) -> None:
    """Not by their values, wherever the tensors are."""
    assert signature((value,), {}) == shown


def test_an_argument_that_was_split_by_mistake_is_named() -> None:
    """With the option that gives every micro-batch the whole of it."""
    with pytest.raises(
        RecordingError,
        match=r"\(float32\[2, 4\], mask=float32\[2, 8\]\), the first of 4 micro-batches \(2 of the "
        r"batch's 8 samples\): x was split on dim 0, mask too \(batch_dims=\{'mask': None\} gives "
        r"it whole\): RuntimeError",
    ):
        pipeline(Attends())(torch.ones(8, 4), mask=torch.ones(8, 8))
    whole = pipeline(Attends(), batch_dims={"mask": None})
    whole(torch.ones(8, 4), mask=torch.ones(8, 8))


def test_batch_norm_of_single_samples_asks_for_fewer_chunks() -> None:
    """And that many do."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(RecordingError, match=r"fewer chunks \(chunks=4 or less for this batch\)"):
        pipeline(net, chunks=8)(torch.ones(8, 4))
    pipeline(net, chunks=4)(torch.ones(8, 4))


def test_a_target_given_by_position_is_asked_for_by_name() -> None:
    """``forward_backward(x, y, loss_fn=…)`` is what plain loops are used to."""
    net, y = nn.Sequential(nn.Linear(4, 4)), torch.zeros(8, dtype=torch.long)
    with pytest.raises(UsageError, match=r"expected a target .* by name: target=…"):
        pipeline(net).forward_backward(torch.ones(8, 4), y, loss_fn=F.cross_entropy)


class Keeps(nn.Module):
    """Writes to a table that an earlier forward has made; its other branch needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h.detach().numpy()
        if self.table is None:
            self.table = torch.zeros(4)
        self.table.add_(h.sum(0))
        return h + self.table


def test_a_table_of_inference_mode_asks_for_no_grad() -> None:
    pipe, x = pipeline(Keeps(), chunks=1), torch.randn(2, 4)
    with torch.inference_mode():
        pipe(x)
        pipe.eval()
        with pytest.raises(RecordingError, match=r"under torch\.no_grad\(\) instead of"):
            pipe(x)


def test_a_shape_for_a_sample() -> None:
    """Other summaries take it; here the tensor is asked for."""
    net = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(RecordingError, match=r"not their shapes: torch\.zeros\(8, 16\)"):
        pipeline(net).summary((8, 16))


def test_stages_without_a_sample() -> None:
    """A model alone does not say what its forward takes."""
    with pytest.raises(UsageError, match=r"takes \(x, mask\) .*; write "):
        bp.get_pipeline_stage_assignment(Attends())


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        log = logging.getLogger(LOGGER).error
        log("here")
        thread = threading.Thread(target=log, args=("elsewhere",))
        thread.start()
        thread.join()
        return x + 1


def test_torch_logs_nothing_of_what_the_fake_tensors_of_a_recording_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But what others log meanwhile, and later."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RecordingError, match="forward fails on the sample"):
            bp.record(nn.Linear(4, 4), torch.ones(2, 3))
        bp.record(Logs(), torch.ones(2))
        logger.error("later")
    finally:
        logger.removeHandler(caplog.handler)
    messages = [record.getMessage() for record in caplog.records]
    assert list(dict.fromkeys(messages)) == ["elsewhere", "later"]
