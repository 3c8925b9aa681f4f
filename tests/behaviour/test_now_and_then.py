"""What a forward writes, or reads, only now and then, by conditions that no recording shows."""

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.randn(8, 4)


class Encoder(nn.Module):
    """Refreshes what it keeps when its history is full."""

    def __init__(self, what: str, every: int) -> None:
        super().__init__()
        self.layer, self.what, self.every = nn.Linear(4, 4), what, every
        self.history: list[Tensor] = []
        self.register_buffer("anchor", torch.zeros(4))
        self.scale, self.plain, self.held = 0.0, torch.zeros(4), [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.history.append(h.detach().mean(0))
        # No branch: which of two functions a table has.
        {True: lambda: self.refresh(), False: lambda: None}[len(self.history) == self.every]()
        return h

    def refresh(self) -> None:
        getattr(self, self.what)(torch.stack(self.history).mean(0))
        self.history.clear()

    def buffer(self, mean: Tensor) -> None:
        self.anchor.copy_(mean)

    def number(self, mean: Tensor) -> None:
        self.scale = mean.sum().item()

    def attribute(self, mean: Tensor) -> None:
        self.plain.copy_(mean)

    def element(self, mean: Tensor) -> None:
        self.held[0].copy_(mean)


READS: dict[str, Callable[[Encoder], Any]] = {
    "buffer": lambda encoder: encoder.anchor.clone(),
    "number": lambda encoder: encoder.scale,
    "attribute": lambda encoder: encoder.plain.clone(),
    "element": lambda encoder: encoder.held[0].clone(),
}


class Decoder(nn.Module):
    """Reads what the encoder keeps, always or now and then."""

    def __init__(self, encoder: Encoder, read: Callable[[Encoder], Any], every: int = 1) -> None:
        super().__init__()
        self.layer, self.encoder, self.read = nn.Linear(4, 4), [encoder], read
        self.turns, self.seconds = [*(every - 1) * [False], True], 0.0

    def forward(self, h: Tensor) -> Tensor:
        time.sleep(self.seconds)
        h = self.layer(h)
        now, self.turns = self.turns[0], [*self.turns[1:], self.turns[0]]
        return [lambda h: h, lambda h: h * (1 + self.read(self.encoder[0]))][now](h)


def _net(encoder: Encoder, decoder: Decoder) -> nn.Module:
    return bp.begin_blocks(nn.Sequential(encoder, decoder), {"1": 1})


def _trains_alike(pipe: bp.Pipeline, net: nn.Module, plain: nn.Module, steps: int) -> None:
    for _ in range(steps):
        for model in (net, plain):
            model.zero_grad()
        loss = pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (X,), {}, X, mse_loss, 4))
        assert_same_gradients(net, plain)


@pytest.mark.cpu("the host's tensors are read by the other stage as they are")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("what", ["buffer", "attribute", "element"])
def test_what_is_written_now_and_then_for_another_stage_is_refused(what: str, schedule: str):
    """The recording of the step's own micro-batches showed no such write either, and that was all:
    from the tenth micro-batch on, the second stage read later ones' without a word."""
    encoder = Encoder(what, 10)
    net = _net(encoder, Decoder(encoder, READS[what]))
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    _trains_alike(pipe, net, plain, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pipe.forward_backward(X, target=X, loss_fn=mse_loss)
            told = " ".join(str(one.message) for one in caught)
        except StateError as error:
            told = str(error)
    assert "was written during the step by code that no recording shows" in told
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    _trains_alike(pipe, net, plain, 6)  # one by one


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_number_that_is_set_now_and_then_for_another_stage_is_refused(schedule: str) -> None:
    """At once, and not at the end of the step."""
    encoder = Encoder("number", 10)
    net = _net(encoder, Decoder(encoder, READS["number"]))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    _trains_alike(pipe, net, copy.deepcopy(net), 2)
    with pytest.raises(StateError, match=r"scale was set during the step, .* on stage 0"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.cpu("the host's tensors are read by the other stage as they are")
@pytest.mark.parametrize("what", READS)
def test_what_is_written_now_and_then_by_its_own_module_is_fine(what: str) -> None:
    class Own(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + READS[what](self))

    net = bp.begin_blocks(nn.Sequential(Own(what, 10), nn.Linear(4, 4)), {"1": 1})
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    _trains_alike(pipe, net, plain, 6)


class Writer(nn.Module):
    """Refreshes what another stage's module keeps and reads."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.layer, self.encoder, self.history = nn.Linear(4, 4), [encoder], list[Tensor]()

    def forward(self, h: Tensor) -> Tensor:
        h = self.layer(h)
        self.history.append(h.detach().mean(0))
        {True: lambda: self.refresh(), False: lambda: None}[len(self.history) == 6]()
        return h

    def refresh(self) -> None:
        getattr(self.encoder[0], self.encoder[0].what)(self.history.pop())
        self.history.clear()


@pytest.mark.cpu("the host's tensors are written by the other stage as they are")
@pytest.mark.parametrize("what", READS)
def test_what_another_stage_writes_now_and_then_is_refused(what: str) -> None:
    """A module that reads what is its own may not be the one that writes it."""

    class Own(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 + READS[what](self))

    own = Own(what, 0)
    net = bp.begin_blocks(nn.Sequential(own, Writer(own)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"was (written|set) during the step"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


class Leaves(nn.Module):
    """Leaves a tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.feature = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.feature = h.detach().mean(0)
        return h


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
@pytest.mark.parametrize("every", [1, 5])
def test_a_tensor_that_is_read_now_and_then_is_the_micro_batchs_own(every: int) -> None:
    """Both modules stayed on their stages, so that nobody saw which micro-batch's it read."""
    encoder = Leaves()
    decoder = Decoder(encoder, lambda encoder: encoder.feature, every)
    net, decoder.seconds = _net(encoder, decoder), 0.05

    def train() -> None:
        for _ in range(4):
            pipe.forward_backward(X, target=X, loss_fn=mse_loss)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"belongs to micro-batch \d of this step"):
        train()
