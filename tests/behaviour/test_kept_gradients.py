"""What hooks, custom functions and losses keep and write in place, while other stages read it."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, host, stages

X = torch.arange(32.0).view(8, 4) / 32


class Slow(Function):
    """Its backward takes a while, so that the next micro-batch's hooks come before it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(0.003)
        return gradients[0] * 1.0


class Hooked(nn.Module):
    """The second stage has a hook on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def hook(self, gradient: Tensor) -> Tensor | None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = Slow.apply(self.a(x))
        with bp.Block(stage=1):
            h = h.view_as(h)
            if h.requires_grad:
                h.register_hook(self.hook)
            return self.b(h)


class Mean(Hooked):
    """A running mean, which begins with the gradient itself."""

    def hook(self, gradient: Tensor) -> None:
        if self.kept is None:
            self.kept = gradient.detach()
        else:
            self.kept.mul_(0.9).add_(gradient, alpha=0.1)


class Workspace(Hooked):
    """Hands on what it computes in memory that it has for all micro-batches."""

    def hook(self, gradient: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.empty_like(gradient)
        return self.kept.copy_(gradient * 0.5)


class Momentum(Hooked):
    """Hands on a sum over the micro-batches."""

    def hook(self, gradient: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.zeros_like(gradient)
        return self.kept.mul_(0.5).add_(gradient)


class OfModule(Mean):
    """By a hook of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda module, given, got: self.hook(given[0]))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = Slow.apply(self.a(x))
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize("kind", [Mean, Workspace, Momentum, OfModule])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_gradient_that_a_hook_keeps_is_the_plain_loops_on_the_stage_before(
    kind: type[Hooked], schedule: str
) -> None:
    net, plain = kind(), kind()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        plain_step(plain, (X,), {}, X, mse_loss, 4)
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert_same_gradients(net, plain)
    assert net.kept is not None
    assert plain.kept is not None
    assert_close(host(net.kept), host(plain.kept))


def test_the_gradient_of_an_input_that_a_hook_keeps_is_the_plain_loops() -> None:
    class First(Mean):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = x.view_as(x)
                if h.requires_grad:
                    h.register_hook(self.hook)
                h = self.a(h)
            with bp.Block(stage=1):
                return self.b(h)

    net, given, expected = First(), X.clone().requires_grad_(), X.clone().requires_grad_()
    plain = copy.deepcopy(net).to(stages(1)[0])
    for part in expected.chunk(4):  # nothing of it outlives the loop but .grad
        plain.kept = None
        (mse_loss(plain(part.to(stages(1)[0])).cpu(), part.detach()) / 4).backward()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(given, target=X, loss_fn=mse_loss)
    assert given.grad is not None
    assert expected.grad is not None
    assert_close(host(given.grad), expected.grad)


class Smoothed(nn.Module):
    """A loss with a running mean, which begins with the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(output, target)
        if self.mean is None:
            self.mean = loss.detach()
        else:
            self.mean.mul_(0.5).add_(loss.detach())
        return loss


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_a_loss_that_its_function_keeps_is_what_it_returned(schedule: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), stage=1))
    plain = copy.deepcopy(net).to(stages(1)[0])
    expected = torch.stack([mse_loss(host(plain(x.to(stages(1)[0]))), x) for x in X.chunk(4)])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    result = pipe.forward_backward(X, target=X, loss_fn=Smoothed())
    assert_close(host(result.loss), expected.mean().detach())
