"""Tensors that no module has registered are put back by whatever runs the forward once more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

Change = Callable[["Teaches", Tensor], object]


class Teaches(nn.Module):
    """Has a teacher and a memory that no module has registered, and may read a value."""

    def __init__(self, change: Change, *, reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads
        self.teacher = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]
        self.memory, self.change = torch.zeros(4), [change]
        self.optimizer = torch.optim.Adam(self.teacher[0].parameters(), lr=0.1)
        self.learn(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.reads and not torch.isfinite(h).all():
                return h
            self.change[0](self, h.detach())
        with bp.Block(stage=1):
            return self.b(h)

    def learn(self, h: Tensor) -> None:
        with torch.enable_grad():
            self.teacher[0](h).square().sum().backward()
        self.optimizer.step()

    def average(self, h: Tensor) -> None:
        with torch.no_grad():
            for own, new in zip(self.teacher[0][0].parameters(), self.a.parameters(), strict=True):
                own.lerp_(new.to(own.device), 0.5)
            self.teacher[0](h.to(own.device))

    def average_data(self, _: Tensor) -> None:
        for own, new in zip(self.teacher[0][0].parameters(), self.a.parameters(), strict=True):
            own.data = own.data * 0.9 + new.data * 0.1

    def remember(self, h: Tensor) -> None:
        self.memory.data = self.memory * 0.9 + h.mean(0)

    def load(self, _: Tensor) -> None:
        first = self.teacher[0][0]
        first.load_state_dict({name: value / 2 for name, value in first.state_dict().items()})


CHANGES = {
    "averages": Teaches.average,
    "sets the data": Teaches.average_data,
    "sets a tensor's data": Teaches.remember,
    "trains": Teaches.learn,
    "loads": Teaches.load,
    "changes the dtype": lambda net, _: net.teacher[0].half(),
    "changes the shape": lambda net, _: net.memory.unsqueeze_(0),
    "freezes": lambda net, _: net.teacher[0].requires_grad_(False),
    "unfreezes": lambda net, _: net.memory.requires_grad_(),
    "replaces": lambda net, _: setattr(net.teacher[0][0], "weight", nn.Parameter(torch.eye(4))),
    "clears gradients": lambda net, _: net.teacher[0].zero_grad(),
    "clips gradients": lambda net, _: nn.utils.clip_grad_norm_(net.teacher[0].parameters(), 1e-3),
}


def hidden(net: Teaches) -> list[tuple[Any, ...]]:
    """Describe the tensors which ``net`` hides."""
    tensors = [net.memory, *net.teacher[0].state_dict(keep_vars=True).values()]
    of_each = [value for state in net.optimizer.state.values() for value in state.values()]
    gradients = [t.grad for t in tensors if t.grad is not None]
    return [
        (t.requires_grad, t.dtype, t.tolist(), [t.grad is g for g in gradients])
        for t in (*tensors, *gradients, *of_each)
    ]


def seeded(make: Callable[[], Teaches]) -> Teaches:
    torch.manual_seed(0)  # a copy of a parameter has no gradient
    return make()


RUNS = {
    "record": lambda net, x, _: bp.record(net, x),
    "real": lambda net, x, _: bp.record(net, x, fake=False),
    "verify": lambda net, x, y: pipeline(net).verify(x, target=y, loss_fn=mse_loss),
    "find_chunks": lambda net, x, y: pipeline(net).find_chunks(x, target=y, loss_fn=mse_loss),
    "balance": lambda net, x, y: bp.balance(net, x, target=y, loss_fn=mse_loss, repeats=1),
}


def pipeline(net: nn.Module) -> bp.Pipeline:
    return bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)


# The others restore by what verify does.
PAIRS = [(change, run) for change in CHANGES for run in ("record", "real", "verify")]
PAIRS += [(change, run) for change in ("trains", "loads") for run in ("find_chunks", "balance")]


@pytest.mark.parametrize(("change", "run"), PAIRS)
def test_what_a_forward_does_to_hidden_tensors_is_put_back(change: str, run: str):
    """Attack 23: a teacher in a list was trained by ``verify``; a fake gradient stayed."""
    net = Teaches(CHANGES[change])
    before = hidden(net)
    RUNS[run](net, torch.randn(8, 4), torch.randn(8, 4))
    assert hidden(net) == before


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("change", ["averages", "sets the data", "sets a tensor's data", "trains"])
def test_steps_do_to_hidden_tensors_what_the_plain_loop_does(change: str, *, reads: bool):
    """Attack 23: after ``memory.data = …``, a step had a tensor without memory."""
    net, plain = (seeded(lambda: Teaches(CHANGES[change], reads=reads)) for _ in range(2))
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
    for _ in range(2):
        assert pipe.forward_backward(x, loss_fn=torch.sum).loss.isfinite()
        for part in x.chunk(4):
            plain(part)
    assert hidden(net) == hidden(plain)


class Lists(nn.Module):
    """Adds an entry to an array of numpy by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            self.seen.resize(self.seen.size + 1, refcheck=False)
            self.seen[-1] = 1
        with bp.Block(stage=1):
            return self.b(x)


def test_an_array_that_the_forward_resizes_is_put_back() -> None:
    """It has the plain loop's entries, and the first step is no ``ValueError``."""
    net = Lists()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
    for _ in range(2):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    assert net.seen.tolist() == [0.0] + [1.0] * 8


class ReadsWhatGrew(Lists):
    """The other stage reads the array."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            self.seen.resize(self.seen.size + 1, refcheck=False)
        with bp.Block(stage=1):
            return self.b(x) * float(self.seen[0])


def test_an_array_that_the_forward_resizes_for_another_stage_is_refused() -> None:
    """A weak reference of the recording's was in the way: a bare ``ValueError``."""
    pipe = bp.Pipeline(ReadsWhatGrew(), devices=["cpu"] * 2, chunks=4)
    with pytest.raises(StateError, match="seen|array"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    net = ReadsWhatGrew()
    with bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule="sequential") as pipe:
        for _ in range(2):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    assert len(net.seen) == 9
