"""Models that return what they are given, called without gradients."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import assert_close, stages


class ReturnsInput(nn.Module):
    """Returns its argument, and a view of it, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h), x, x[:, :2]


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_input_that_needs_grad_when_the_model_returns_it_without_gradients_is_the_plain_ones(
    mode, schedule, chunks
) -> None:
    """Under ``no_grad`` an alias of a leaf needs grad and has no place in a graph."""
    net = ReturnsInput()
    x = torch.randn(6, 4, requires_grad=True)
    with mode():
        expected = net(x)
        pipe = bp.Pipeline(net, devices=[stages(1)[0]] * 2, chunks=chunks, schedule=schedule)
        assert_close(pipe(x), expected)
        assert_close(pipe(x), expected)


class ReturnsParameter(nn.Module):
    """Returns a parameter of its own beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x)), self.a.bias


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_parameter_when_the_model_returns_it_without_gradients_is_its_values(mode, schedule):
    """In inference mode a leaf's place in the graph cannot be asked for, and nobody needs it."""
    net = ReturnsParameter()
    x = torch.randn(6, 4)
    with mode():
        expected = net(x)
        pipe = bp.Pipeline(net, devices=[stages(1)[0]] * 2, chunks=2, schedule=schedule)
        assert_close(pipe(x), expected)
        assert_close(pipe(x), expected)
