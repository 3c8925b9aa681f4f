"""Conditions by what forwards count, wherever the function has them."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....alike import DEVICE
from ....parity import assert_same_gradients, plain_step
from ....stage_devices import assert_close, stages

Refresh = Callable[["Encoder", Tensor], None]


class Encoder(nn.Module):
    """Refreshes a buffer and a number now and then."""

    def __init__(self, refresh: Refresh) -> None:
        super().__init__()
        self.layer, self.calls, self.last = nn.Linear(4, 4), 0, 1.0
        self.refresh, self.seen = refresh, list[Any]()
        self.turns = itertools.cycle([*4 * [False], True])
        self.register_buffer("anchor", torch.ones(4))

    def due(self) -> bool:
        return self.calls % 5 == 0

    def put(self, h: Tensor) -> None:
        self.anchor.copy_(h.detach().mean(0))
        self.last = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.calls += 1
        self.refresh(self, h)
        return h


def _in_a_variable(encoder: Encoder, h: Tensor) -> None:
    refresh = encoder.calls % 5 == 0
    if refresh:
        encoder.put(h)


def _in_a_variable_of_a_variable(encoder: Encoder, h: Tensor) -> None:
    rest = encoder.calls % 5
    is_due = not rest
    if is_due and encoder.training:
        encoder.put(h)


def _by_a_method(encoder: Encoder, h: Tensor) -> None:
    if encoder.due():
        encoder.put(h)


def _by_what_a_method_gave(encoder: Encoder, h: Tensor) -> None:
    refresh = encoder.due()
    if not refresh:
        return
    encoder.put(h)


def _unpacked(encoder: Encoder, h: Tensor) -> None:
    _, rest = divmod(encoder.calls, 5)
    if rest == 0:
        encoder.put(h)


def _turns(encoder: Encoder, h: Tensor) -> None:
    times = int(encoder.calls % 5 == 0)
    for _ in range(times):
        encoder.put(h)


def _in_a_dictionary(encoder: Encoder, h: Tensor) -> None:
    asked = {"due": encoder.calls % 5 == 0}
    if asked["due"]:
        encoder.put(h)


def _by_a_length(encoder: Encoder, h: Tensor) -> None:
    encoder.seen.append(h.shape)
    if len(encoder.seen) % 5 == 0:
        encoder.put(h)


def _by_an_iterator(encoder: Encoder, h: Tensor) -> None:
    if next(encoder.turns):
        encoder.put(h)


WAYS = [
    *(_in_a_variable, _in_a_variable_of_a_variable, _by_a_method, _by_what_a_method_gave),
    *(_unpacked, _turns, _in_a_dictionary, _by_a_length, _by_an_iterator),
]


class Net(nn.Module):
    """Its second stage reads what the first one refreshes, or only the first one does."""

    def __init__(self, refresh: Refresh, read: str) -> None:
        super().__init__()
        self.encoder, self.head, self.read = Encoder(refresh), nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.encoder(x)
            if self.read == "own":
                h = h * self.encoder.anchor.clone() * self.encoder.last
        with bp.Block(stage=1):
            if self.read == "buffer":
                h = h + self.encoder.anchor
            elif self.read == "number":
                h = h * self.encoder.last
            return self.head(h)


@pytest.mark.parametrize("read", ["buffer", "number"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_refresh_by_a_count_is_refused_where_another_stage_reads(way: Refresh, read: str) -> None:
    """A condition counted only where a branch had it itself; from the fifth forward on, the second
    stage read what a later micro-batch had left."""
    pipe = bp.Pipeline(Net(way, read), devices=stages(2), chunks=4, schedule="gpipe")
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"encoder\.(anchor|last)"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def _assert_runs_as_plain(net: nn.Module) -> None:
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for _ in range(3):
        x = torch.randn(8, 4)
        there = x.to(DEVICE)
        loss = pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (there,), {}, there, mse_loss, 4))
        assert_same_gradients(net, plain)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_refresh_by_a_count_is_fine_for_the_own_stage(way: Refresh) -> None:
    _assert_runs_as_plain(Net(way, "own"))


def test_a_gradient_that_a_branch_scales_on_another_stage_is_refused() -> None:
    class Scales(nn.Module):
        """Scales the gradient of another stage's weight at every fifth call."""

        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.layer, self.other, self.calls = nn.Linear(4, 4), [other], 0

        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            weight = self.other[0].weight
            if self.calls % 5 == 0 and weight.grad is not None:
                weight.grad.mul_(0.5)
            return self.layer(h)

    first = nn.Linear(4, 4)
    net = bp.begin_blocks(nn.Sequential(first, Scales(first)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"the \.grad of '0\.weight'"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)


class Scales(nn.Module):
    """Its second stage calls a function that would read what the first one sets, if it were so."""

    def __init__(self, use: Callable[["Scales", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use
        self.scale, self.is_on, self.turns = 1.0, False, 0

    def scaled(self, h: Tensor, by: bool = False, *, times: int = 0) -> Tensor:
        if by:
            h = h / self.scale
        return h / self.scale if times > 1 else h

    def handed(self, h: Tensor, by: bool) -> Tensor:
        return self.scaled(h, by)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.scale = 1.0 + h.abs().max().item()
            self.turns += 1
        with bp.Block(stage=1):
            return self.b(self.use(self, h))


@pytest.mark.parametrize(
    "use",
    [
        lambda net, h: net.scaled(h),
        lambda net, h: net.scaled(h, False),
        lambda net, h: net.scaled(h, by=net.is_on, times=1),
        lambda net, h: net.scaled(by=False, h=h),
        lambda net, h: Scales.scaled(net, h, by=False),
        lambda net, h: net.handed(h, False),
    ],
)
def test_an_option_that_the_caller_leaves_out_or_fixes_is_no_question_of_data(
    use: Callable[[Scales, Tensor], Tensor],
) -> None:
    """A forward that never reads was refused for the branch behind its option."""
    _assert_runs_as_plain(Scales(use))


def _from_a_list(net: Scales, h: Tensor) -> Tensor:
    return net.scaled(*[h, bool(h.sum() > 1e9)])


def _from_a_generator(net: Scales, h: Tensor) -> Tensor:
    def scaled(by: bool) -> Any:
        if by:
            yield h / net.scale
        yield h

    first, _ = scaled(bool(h.sum() > 1e9)), scaled(False)
    return next(iter(first))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "use",
    [
        lambda net, h: net.scaled(h, h.sum().item() > 1e9),
        lambda net, h: net.scaled(h, times=int(h.sum() > 1e9)),
        lambda net, h: net.scaled(h, net.turns % 50 == 0),
        lambda net, h: net.handed(h, bool(h.sum() > 1e9)),
        _from_a_list,
        _from_a_generator,
    ],
)
def test_an_option_by_the_data_is_refused_where_another_stage_reads(
    use: Callable[[Scales, Tensor], Tensor],
) -> None:
    pipe = bp.Pipeline(Scales(use), devices=stages(2), chunks=4, schedule="gpipe")
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"scale"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
