"""Questions about a tensor that another stage has left on the model."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.crossing.tensors.questions import ABOUT_VALUES, METADATA
from blockpipe.errors import StateError

from ...alike import check_trains_alike
from ...models import square
from ...parity import difference, plain_step
from ...stage_devices import stages

ASKS: dict[str, Callable[[Tensor], Any]] = {
    "len": len,
    "shape": lambda t: t.shape[0],
    "size": lambda t: t.size(0),
    "numel": lambda t: t.numel(),
    "requires_grad": lambda t: float(t.requires_grad),
    "dim": lambda t: t.dim(),
    "dtype": lambda t: float(t.dtype is torch.float32),
}


class Slow(nn.Linear):
    """Meanwhile the first stage is at a later micro-batch."""

    waits = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05 * self.waits)
        return super().forward(x)


class Net(nn.Module):
    """Three layers; the first stage leaves rows that the data choose."""

    def __init__(self, ask: Callable[[Tensor], Any], *, waits: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.ask = nn.Linear(4, 4), Slow(4, 4), nn.Linear(4, 4), ask
        self.b.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.left = x[: 1 + int((x[:, 0] > 0).sum())]
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=2):
            return self.c(h) * (1 + self.ask(self.left))


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
@pytest.mark.parametrize("how", ASKS)
def test_an_answer_by_another_micro_batchs_tensor_is_refused(how: str) -> None:
    """As an operation on it is: it would be about other data."""
    net = Net(ASKS[how], waits=True)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"belongs to micro-batch [1-3] of this step"):
        _steps(pipe)


@pytest.mark.parametrize("how", ASKS)
def test_the_own_micro_batchs_tensor_answers(how: str) -> None:
    net, plain = (Net(ASKS[how], waits=False) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    x = torch.randn(16, 4)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="sequential")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


TABLES: dict[str, tuple[Callable[[int], Tensor], Callable[[Tensor], Any]]] = {
    "size": (lambda n: torch.ones(1 + n % 5, 3).tril(), lambda t: t.shape[0]),
    "elements": (lambda n: torch.eye(2 + n % 3), lambda t: t.numel()),
    "dtype": (lambda n: torch.ones(2, dtype=[torch.float32, torch.float64][n % 2]), ASKS["dtype"]),
    "in a tuple": (lambda n: torch.zeros(1 + n % 5), lambda t: t.size(0)),
}


class Tables(Net):
    """The first stage leaves a table that follows from nothing of the micro-batch's."""

    def __init__(self, how: str) -> None:
        make, ask = TABLES[how]
        super().__init__(
            lambda left: ask(left[0]) if how == "in a tuple" else ask(left), waits=True
        )
        self.how, self.make, self.n = how, make, 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
            table = self.make(self.n)
            self.left = (table,) if self.how == "in a tuple" else table
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=2):
            return self.c(h) * (1 + self.ask(self.left))


@pytest.mark.cpu("how far the first stage comes is a matter of timing there")
@pytest.mark.parametrize("how", TABLES)
def test_an_answer_by_another_micro_batchs_table_is_refused(how: str) -> None:
    """Attack 19: its values were compared when they were read, and nothing if only the size was."""
    pipe = bp.Pipeline(Tables(how), devices=stages(3), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"belongs to micro-batch|made anew with other values"):
        _steps(pipe)


class SameSizes(Tables):
    """Its values are other ones each time, its size is not."""

    def __init__(self) -> None:
        super().__init__("size")
        self.make = lambda n: torch.full((3, 2), float(n))


def test_tables_of_one_size_answer_for_each_other() -> None:
    net, x = SameSizes(), torch.randn(16, 4)
    plain = SameSizes()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="gpipe")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same


def test_which_object_a_tensor_is_may_be_asked() -> None:
    """A hash, and where it is, are no values."""
    assert METADATA > ABOUT_VALUES
    assert Tensor.__hash__ in METADATA - ABOUT_VALUES
    net = Net(lambda t: float(hash(t) != 0) + float(t.is_leaf), waits=True)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="gpipe")
    _steps(pipe)


def _steps(pipe: bp.Pipeline) -> None:
    for _ in range(3):  # in the first, lanes take turns
        pipe.forward_backward(torch.randn(16, 4), loss_fn=square)


class Carries(nn.Module):
    """Goes on from the state of the forward before, if that has the size of now."""

    def __init__(self, ask: Callable[[Tensor], Any], stage: int) -> None:
        super().__init__()
        self.a, self.b, self.ask, self.on = nn.Linear(4, 4), nn.Linear(4, 4), ask, stage
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage):
                if stage == self.on:
                    if self.state is None or self.ask(self.state) != self.ask(x):
                        self.state = torch.zeros_like(x)
                    x = x + self.state
                    self.state = x.detach()
                x = layer(x)
        return x


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("how", [how for how in ASKS if how != "requires_grad"])
def test_a_stage_asks_about_its_own_state_before_its_first_operation(how: str, stage: int) -> None:
    """Attack 24: until then the run was on no stage, or on the one before, and was refused."""
    check_trains_alike(Carries(ASKS[how], stage))
