"""First calls that say nothing of what the backwards of two micro-batches do to each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages

X = torch.arange(32.0).view(8, 4) / 32


class Clipped(nn.Module):
    """Scales a weight by ``.data`` before its own stage uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            self.b.weight.data.mul_(0.9)
            h = self.b(h).tanh()
        with bp.Block(stage=1):
            return self.c(h)


class Carries(nn.Module):
    """Carries a hidden state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.r, self.h = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        fits = self.h is not None and len(self.h) == len(x)
        h = self.h if fits else torch.zeros_like(x)
        new = torch.tanh(self.l(x) + self.r(h))
        self.h = new.detach()
        return torch.tanh(new * x)


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.c = Carries(), Carries(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.p(x)
        with bp.Block(stage=1):
            return self.c(self.q(x))


def _one_sample(pipe: bp.Pipeline) -> None:
    for _ in range(2):
        pipe.forward_backward(X[:1], target=X[:1], loss_fn=mse_loss)


def _output_alone(pipe: bp.Pipeline) -> None:
    assert pipe(X).shape == (8, 4)


def _without_gradients(pipe: bp.Pipeline) -> None:
    with torch.no_grad():
        pipe(X)


def _refused_backward(pipe: bp.Pipeline) -> None:
    with pytest.raises(StateError):
        pipe(X).sum().backward()


def _nothing(pipe: bp.Pipeline) -> None:
    """The step is the first call."""


BEFORE = [_nothing, _one_sample, _output_alone, _without_gradients, _refused_backward]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    ("kind", "options"), [(Clipped, {}), (Carried, {"checkpoint": "except_last"})]
)
def test_the_first_step_of_several_micro_batches_is_compared(
    kind: type[nn.Module], options: dict[str, Any], before: Callable[[bp.Pipeline], None]
) -> None:
    """After a first batch of one sample, or a call without a backward, nothing was any more."""
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=4, schedule="gpipe", **options)
    before(pipe)
    with pytest.raises(StateError, match=r"by \.data|when it was recomputed"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
