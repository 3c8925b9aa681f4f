"""Mocks in the forward's reach, as tests of training code have them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock, create_autospec

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.restoring.model_state import ModelState

from ..stage_devices import stages


class Writer:
    """What logs numbers."""

    def add_scalar(self, name: str, value: float) -> None: ...


class Logs(nn.Module):
    def __init__(self, writer: Any, log: Callable[[Any], object]) -> None:
        super().__init__()
        self.a, self.b, self.writer, self.log = nn.Linear(4, 4), nn.Linear(4, 4), writer, log

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.log(self.writer)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)


def _adds(writer: Any) -> object:
    return writer.add_scalar("loss", 1.0)


def _counts(table: Any) -> object:
    return table.get("n", 0)


@pytest.mark.parametrize(
    ("make", "log"),
    [
        (MagicMock, _adds),
        (Mock, _adds),
        (lambda: MagicMock(spec=Writer), _adds),
        (lambda: create_autospec(Writer, instance=True), _adds),
        (lambda: MagicMock(spec=dict), _counts),
        (lambda: MagicMock(spec=list), len),
    ],
    ids=["magic", "mock", "spec", "autospec", "of a dict", "of a list"],
)
def test_a_mock_counts_the_calls_of_the_micro_batches(
    make: Callable[[], Any], log: Callable[[Any], object]
) -> None:
    """One of a dictionary was a crash, and a walk over others made ever new ones."""
    writer = make()
    net = Logs(writer, log)
    assert len(ModelState(net, values=False).objects()) < 1_000
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    assert len(writer.mock_calls) == 4
