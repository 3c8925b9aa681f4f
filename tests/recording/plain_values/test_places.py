"""What torch's own methods set: modes of modules, which parameters need a gradient, submodules."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...models import square
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

Sets = Callable[["Net", bool], object]
Reads = Callable[["Net", Tensor], Tensor]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def train(self, mode: bool = True) -> "Own":
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2 if self.training else 1)


class Net(nn.Module):
    """What stage 0 sets follows from the data; stage 1 reads it."""

    def __init__(self, sets: Sets, reads: Reads) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.own = nn.BatchNorm1d(4), Own()
        self.one, self.other = nn.Tanh(), nn.Sigmoid()
        self.now: nn.Module | None = self.one
        self.sets, self.reads = sets, reads

    def forward(self, x: Tensor) -> Tensor:
        is_large = float(x.mean()) > 0
        with bp.Block(stage=0):
            self.sets(self, is_large)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(self.reads(self, h))


def _eval_or_train(net: Net, is_large: bool) -> None:
    if is_large:
        net.norm.eval()
    else:
        net.norm.train()


def _needs_gradient(net: Net, is_large: bool) -> None:
    net.c.bias.requires_grad = is_large


def _by_assignment(net: Net, is_large: bool) -> None:
    net.now = net.one if is_large else net.other


def _by_entry(net: Net, is_large: bool) -> None:
    net._modules["now"] = net.one if is_large else net.other


def _none(net: Net, is_large: bool) -> None:
    net.now = None if is_large else net.one


def _forward(net: Net, is_large: bool) -> None:
    net.c.forward = lambda x: x * (2 if is_large else 1)


PAIRS: list[tuple[Sets, Reads, str]] = [
    (_eval_or_train, lambda net, h: net.norm(h), "norm.training"),
    (lambda net, is_large: net.own.train(mode=is_large), lambda net, h: net.own(h), "own.training"),
    (
        lambda net, _: net.train(not net.training),
        lambda net, h: h * (2 if net.training else 1),
        "attribute 'training' of the model",
    ),
    (
        lambda net, is_large: setattr(net.own, "training", is_large),
        lambda net, h: net.own(h),
        "own.training",
    ),
    (
        _needs_gradient,
        lambda net, h: h * (2 if net.c.bias.requires_grad else 1),
        "c.bias.requires_grad",
    ),
    (
        lambda net, is_large: net.c.requires_grad_(is_large),
        lambda net, h: h * (2 if net.c.bias.requires_grad else 1),
        "c.bias.requires_grad",
    ),
    (_by_assignment, lambda net, h: net.now(h), "attribute 'now' of the model"),
    (_by_entry, lambda net, h: net.now(h), "attribute 'now' of the model"),
    (
        lambda net, is_large: net.add_module("now", net.one if is_large else net.other),
        lambda net, h: net.now(h),
        "attribute 'now' of the model",
    ),
    (_none, lambda net, h: h if net.now is None else h * 2, "attribute 'now' of the model"),
    (_forward, lambda net, h: net.c(h), "c.forward"),
    (
        lambda net, is_large: setattr(net.c, "forward", torch.tanh if is_large else torch.exp),
        lambda net, h: net.c(h),
        "c.forward",
    ),
]


@pytest.mark.parametrize(("sets", "reads", "what"), PAIRS)
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_what_torchs_methods_set_and_another_stage_reads_is_refused(sets, reads, what, first):
    """Whatever the sample's data, and the value before: the later micro-batches' values were read,
    without a word."""
    pipe = bp.Pipeline(Net(sets, reads), devices=stages(2), chunks=2)
    with pytest.raises(
        StateError,
        match=rf"changes {what} on hops \[0\] \(.*places\.py:\d+\), and reads it on hops .*pass it",
    ):
        pipe.forward_backward(torch.full((4, 4), first), loss_fn=square)


@pytest.mark.parametrize(
    "sets", [_needs_gradient, lambda net, is_large: net.c.requires_grad_(is_large)]
)
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_parameter_when_its_stage_is_another_may_not_be_told_whether_it_needs_a_gradient(
    sets, first
):
    """It was found only if the sample's data changed it."""
    pipe = bp.Pipeline(Net(sets, lambda net, h: net.c(h)), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"changes c.(weight|bias).requires_grad"):
        pipe.forward_backward(torch.full((4, 4), first), loss_fn=square)


def _eval(net: Net, _: bool) -> None:
    net.norm.eval()
    net.own.train(False)


def _as_it_is(net: Net, _: bool) -> None:
    net.own.train(net.training)


def _trains(net: Net, _: bool) -> None:
    net.c.requires_grad_(True)


@pytest.mark.parametrize("sets", [_eval, _as_it_is, _trains])
def test_a_mode_that_follows_from_no_data_is_fine(sets):
    """A part that is frozen in each forward, on whatever stage it is called."""
    net = Net(sets, lambda net, h: net.c(net.own(net.norm(h))))
    plain = copy.deepcopy(net)
    x = torch.randn(4, 4)
    plain_step(plain, (x,), {}, None, square, 2)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(x, loss_fn=square)
    assert_same_gradients(net, plain)


def test_a_mode_that_a_checkpoint_reads_again_is_refused():
    """It ran again with the next micro-batch's."""

    def reads_again(net: Net, h: Tensor) -> Tensor:
        net.c.train(not net.c.training)
        factor = lambda x: x.exp() * (2 if net.c.training else 1)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(factor, h, use_reentrant=False)

    pipe = bp.Pipeline(Net(lambda *_: None, reads_again), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match="c.training.*in a backward.*runs its function again"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


def _two(net: Any, v: float) -> None:
    net.n[0][0] = v


def _row(net: Any, v: float) -> None:
    row = net.n[0]
    row[0] = v


def _rows(net: Any, v: float) -> None:
    for row in net.n:
        row[:] = v


def _mean(net: Any, v: float) -> None:
    row = net.n[0]
    row *= 0.9
    row += 0.1 * v


def _flat(net: Any, v: float) -> None:
    net.n.flat[0] = v


def _ravelled(net: Any, v: float) -> None:
    net.n.T.ravel()[:2] = v


def _filled(net: Any, v: float) -> None:
    net.n[0].fill(v)


def _copied(net: Any, v: float) -> None:
    np.copyto(net.n[0], v)


class Writes(nn.Module):
    """The first stage writes to an array through a view of it, and the second one reads the array."""

    def __init__(self, write: Callable[[Any, float], None]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.n = np.ones((2, 2))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.write(self, x.sum().item())
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) * float(self.n.sum())


@pytest.mark.parametrize(
    "write",
    [_two, _row, _rows, _mean, _flat, _ravelled, _filled, _copied],
    ids=lambda f: f.__name__,
)
def test_a_write_through_a_view_of_an_array_is_a_write_to_it(write):
    """Attack 23: a view is another object each time."""
    pipe = bp.Pipeline(Writes(write), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"an? (numpy )?array|attribute 'n'|ndarray"):
        pipe(torch.randn(8, 4))
