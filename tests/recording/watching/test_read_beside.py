"""A call that is given a tensor of another stage, and finds it in the user's state as well."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages

CONTEXT: dict[str, Tensor] = {}


class Context:
    """An object that is made in each forward."""


class Tokens(nn.Module):
    """Learned tokens behind a frozen embedding: what it returns, it also leaves as a test says."""

    def __init__(self, leave: Callable[..., None]) -> None:
        super().__init__()
        self.embed, self.leave = nn.Linear(4, 4).requires_grad_(False), leave
        self.token, self.out = nn.Parameter(torch.zeros(4)), None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out = self.embed(x) + self.token
        self.leave(self, context, out)
        return out


class Head(nn.Module):
    """Adds what it finds to what it makes of its argument."""

    def __init__(self, find: Callable[..., Tensor], tokens: Tokens) -> None:
        super().__init__()
        self.layer, self.find, self.tokens = nn.Linear(4, 4), find, [tokens]

    def forward(self, h: Tensor, context: Context) -> Tensor:
        return self.layer(h).tanh() + self.find(self.tokens[0], context)


class Net(nn.Module):
    def __init__(self, leave: Callable[..., None], find: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tokens = Tokens(leave)
        self.head = Head(find, self.tokens)

    def forward(self, x: Tensor) -> Tensor:
        context = Context()
        with bp.Block(stage=0):
            h = self.tokens(x, context)
        with bp.Block(stage=1):
            return self.head(h, context)


def _leaves_attribute(tokens: Tokens, context: Context, out: Tensor) -> None:
    tokens.out = out


def _leaves_list(tokens: Tokens, context: Context, out: Tensor) -> None:
    tokens.out = [out]


def _leaves_entry(tokens: Tokens, context: Context, out: Tensor) -> None:
    CONTEXT["out"] = out


def _leaves_in_argument(tokens: Tokens, context: Context, out: Tensor) -> None:
    context.out = out


def _first(tokens: Tokens, context: Context) -> Tensor:
    return tokens.out[0]


def _by_unpacking(tokens: Tokens, context: Context) -> Tensor:
    (out,) = tokens.out
    return out


def _by_name(tokens: Tokens, context: Context) -> Tensor:
    return getattr(tokens, "out")  # noqa: B009


STATE: dict[str, tuple[Callable[..., None], Callable[..., Tensor]]] = {
    "attribute": (_leaves_attribute, lambda tokens, context: tokens.out),
    "by name": (_leaves_attribute, _by_name),
    "list": (_leaves_list, _first),
    "unpacked": (_leaves_list, _by_unpacking),
    "global": (_leaves_entry, lambda tokens, context: CONTEXT["out"]),
    "method": (_leaves_entry, lambda tokens, context: CONTEXT.get("out")),
}


def _record(leave: Callable[..., None], find: Callable[..., Tensor]) -> tuple[Net, Any]:
    net = Net(leave, find)
    recording = bp.record(net, torch.randn(2, 4))
    return net, next(call for call in recording.calls if call.path == "head")


@pytest.mark.parametrize("way", STATE)
def test_a_call_that_finds_its_argument_in_the_state_is_open(way: str) -> None:
    _, head = _record(*STATE[way])
    assert not head.sealed
    assert "it finds an argument beside its arguments" in head.opened
    assert __file__ in head.opened


@pytest.mark.cpu("its forwards wait for each other there, and mix nothing")
@pytest.mark.parametrize("way", STATE)
def test_another_micro_batchs_tensor_is_refused(way: str) -> None:
    pipe = bp.Pipeline(Net(*STATE[way]), devices=stages(2), chunks=6, schedule="gpipe")
    x = torch.randn(12, 4)

    def train() -> None:
        # The first step may have finer turns, and on a busy machine others may happen to mix nothing.
        for _ in range(100):
            pipe.forward_backward(x, target=x, loss_fn=mse_loss)

    with pytest.raises(StateError, match="belongs to micro-batch"):
        train()


def test_what_is_in_an_object_that_it_is_given_is_brought_over() -> None:
    def find(tokens: Tokens, context: Context) -> Tensor:
        return context.out

    net, head = _record(_leaves_in_argument, find)
    assert not head.sealed
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    copy = deepcopy(net)
    expected = plain_step(copy, (x,), {}, target, mse_loss, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(3):
        net.zero_grad()
        assert_close(pipe.forward_backward(x, target=target, loss_fn=mse_loss).loss, expected)
    assert_same_gradients(net, copy)


def test_a_call_that_only_uses_its_argument_stays_sealed() -> None:
    def find(tokens: Tokens, context: Context) -> Tensor:
        return tokens.token.detach() * 0

    class Uses(Head):
        def forward(self, h: Tensor, context: Context) -> Tensor:
            kept = [h]
            return sum((self.layer(kept[0]) * h for _ in range(2)), h.mean(dim=-1, keepdim=True))

    net = Net(_leaves_attribute, find)
    net.head = Uses(find, net.tokens)
    recording = bp.record(net, torch.randn(2, 4))
    assert next(call for call in recording.calls if call.path == "head").sealed
