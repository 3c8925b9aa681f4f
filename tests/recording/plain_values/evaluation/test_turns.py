"""A name that one stage sets now to a tensor and now to none, and of which another asks ``is None``."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import assert_close, stages

LOSS = nn.functional.mse_loss


class Base(nn.Module):
    """Sets a mask on one stage, which the next one asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mask: Tensor | None = None
        self.n, self.on = 0, True

    def sets(self, h: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.sets(h.detach())
        with bp.Block(stage=1):
            h = self.b(h).tanh()
            return h * 2 if self.mask is None else h


class ByCount(Base):
    def sets(self, h: Tensor) -> None:
        self.n += 1
        self.mask = None if self.n % 2 else torch.ones(8, device=h.device)


class ByCountInBranches(Base):
    def sets(self, h: Tensor) -> None:
        self.n += 1
        if self.n % 2:
            self.mask = None
        else:
            self.mask = h.mean(0)


class ByData(Base):
    def sets(self, h: Tensor) -> None:
        self.mask = None if h.sum() > 100 else h.mean(0)


class ByDataInBranches(Base):
    def sets(self, h: Tensor) -> None:
        if h.sum() > 100:
            self.mask = None
        else:
            self.mask = h.mean(0)


class ByDataInFunction(Base):
    def sets(self, h: Tensor) -> None:
        self.mask = self.make(h)

    def make(self, h: Tensor) -> Tensor | None:
        return None if h.sum() > 100 else h.mean(0)


class ByDataInEarlyReturn(ByDataInFunction):
    def make(self, h: Tensor) -> Tensor | None:
        total = h.sum().item()
        if total > 100:
            return None
        return h.mean(0)


TURNS = [
    *(ByCount, ByCountInBranches, ByData, ByDataInBranches),
    *(ByDataInFunction, ByDataInEarlyReturn),
]


@pytest.mark.parametrize("kind", TURNS)
def test_what_is_now_a_tensor_and_now_none_is_refused(kind: type[Base]):
    """Attack 19: the tensor says which micro-batch it is of, and nobody asked what ``None`` says."""
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=4)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(StateError, match=r"changes attribute 'mask'.* and reads it on hops \[1\]"):
        pipe.forward_backward(x, target=y, loss_fn=LOSS)


class Switched(Base):
    def sets(self, h: Tensor) -> None:
        self.mask = h.mean(0) if self.on else None


class InTraining(Base):
    def sets(self, h: Tensor) -> None:
        self.mask = self.make(h)

    def make(self, h: Tensor) -> Tensor | None:
        if not self.training:
            return None
        return h.mean(0) if h.dim() == 2 else None


class OfRealRun(Switched):
    """Its values are read: it is recorded for real."""

    def sets(self, h: Tensor) -> None:
        self.last = h.sum().item()
        super().sets(h)


class MadeOnce(Base):
    def sets(self, h: Tensor) -> None:
        if self.mask is None:
            self.mask = torch.ones(8, device=h.device)


@pytest.mark.parametrize("kind", [Switched, InTraining, OfRealRun, MadeOnce])
def test_what_no_data_choose_runs(kind: type[Base]):
    net = kind()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        loss = pipe.forward_backward(x, target=y, loss_fn=LOSS).loss
        assert_close(loss, plain_step(plain, (x,), {}, y, LOSS, 4))
        assert_same_gradients(net, plain)
        net.zero_grad()
        plain.zero_grad()
