"""Loss functions that share a plain value or a tensor with the forward."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages


class Net(nn.Module):
    """Two layers on two stages, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.alpha = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.register_buffer("center", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(h)

    def first(self, h: Tensor) -> Tensor:
        return h * self.center

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * self.alpha


class Sets(Net):
    """Its forward sets the number on the first stage."""

    def first(self, h: Tensor) -> Tensor:
        self.alpha = h.detach().abs().max().item()
        return h


class Scaled(Net):
    """Its forward reads the number on the first stage."""

    def first(self, h: Tensor) -> Tensor:
        return h * self.alpha


class Criterion(nn.Module):
    """A loss that reads the network's number."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.__dict__["net"] = net

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.net.loss(output, target)


def _reads(net: Net) -> Callable[..., Tensor]:
    return lambda output, target: mse_loss(output, target) * net.alpha


def _reads_in_a_method(net: Net) -> Callable[..., Tensor]:
    return functools.partial(Net.loss, net)


def _sets(net: Net) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        net.alpha = output.detach().abs().max().item()
        return mse_loss(output, target)

    return loss


def _writes(net: Net) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        net.center.mul_(0.9)
        return mse_loss(output, target)

    return loss


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "loss", "what"),
    [
        (Sets, _reads, r"'alpha' of the model on hops \[0\].*reads it on hops \[1\]"),
        (Sets, _reads_in_a_method, r"'alpha' of the model on hops \[0\].*reads it on hops \[1\]"),
        (Sets, Criterion, r"'alpha' of the model on hops \[0\].*reads it on hops \[1\]"),
        (Scaled, _sets, r"'alpha' of the model on hops \[1\].*reads it on hops \[0\]"),
        (Net, _writes, r"buffer 'center' on hops \[1\].*reads it on hops \[0, 1\]"),
    ],
)
def test_a_loss_that_shares_a_value_with_another_stage_is_refused(
    kind: type[Net], loss: Callable[[Net], Callable[..., Tensor]], what: str
) -> None:
    """It read another micro-batch's number, without a word."""
    net = kind()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=rf"{what} \(.*losses\.py:\d+\)"):
        pipe.forward_backward(X, target=X, loss_fn=loss(net))


def test_a_loss_that_comes_later_is_looked_at_too() -> None:
    """The model is recorded once for a loss without values of its own, and again for this one."""
    net = Sets()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"'alpha' of the model on hops \[0\]"):
        pipe.forward_backward(X, target=X, loss_fn=_reads(net))


def test_losses_without_values_share_a_recording() -> None:
    pipe = bp.Pipeline(Net(), devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    first = pipe.recording
    pipe.forward_backward(X, target=X, loss_fn=lambda output, target: (output - target).abs().sum())
    pipe(X)
    assert pipe.recording is first


def _counts_itself(net: Net) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        count.append(output.shape)
        net.last = len(count)
        return mse_loss(output, target) * net.alpha * len(count)

    count: list[torch.Size] = []
    return loss


def test_a_loss_with_values_of_its_own_is_fine() -> None:
    net = Scaled()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=_counts_itself(net))
    plain_step(plain, (X,), {}, X, _counts_itself(plain), 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize(
    ("schedule", "isolate"),
    [("1f1b", False), ("1f1b", True), ("sequential", False), ("uncut", False)],
)
def test_marks_of_a_teacher_in_the_loss_are_passed_over(schedule: str, isolate: bool):
    """It has the student's marks, and runs on the stage of the loss."""
    net = Net()
    plain, teacher = copy.deepcopy(net), copy.deepcopy(net).requires_grad_(False)
    bp.begin_blocks(teacher, {"a": 0, "b": 1})

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        with bp.Block():
            guide = teacher.to(target.device)(target)
        return mse_loss(output, guide + 1) + teacher.a(output).mean()

    x = torch.randn(8, 4)
    devices = stages(1) * 2 if isolate else stages(2)
    pipe = bp.Pipeline(net, devices=devices, chunks=4, schedule=schedule, isolate=isolate)
    for _ in range(2):
        pipe.forward_backward(x, target=x, loss_fn=distilled)
        plain_step(plain, (x,), {}, x, distilled, 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("chunks", [1, 4])
def test_marks_in_the_loss_of_a_model_on_one_stage_are_passed_over(chunks: int):
    net = nn.Linear(4, 4)
    plain, teacher = copy.deepcopy(net), Net().requires_grad_(False)

    def distilled(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, teacher.to(target.device)(target))

    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(1), chunks=chunks)
    pipe.forward_backward(x, target=x, loss_fn=distilled)
    plain_step(plain, (x,), {}, x, distilled, chunks)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
def test_a_loss_that_calls_the_model_itself_runs_it_on_the_last_stage(schedule: str):
    """Its weights cross, and so do their gradients."""
    net = Net()
    plain = copy.deepcopy(net)

    def consistent(called: Net, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, called(target * 0.5))

    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    pipe.forward_backward(x, target=x, loss_fn=functools.partial(consistent, net))
    plain_step(plain, (x,), {}, x, functools.partial(consistent, plain), 4)
    assert_same_gradients(net, plain)
