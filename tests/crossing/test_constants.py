"""Tables that a forward makes of constants and keeps: any micro-batch reads them, on any stage."""

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError

from ..models import square
from ..parameter_sets import each_value, every_pair
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, host, stages

SCHEDULES = ["1f1b", "gpipe", "sequential"]
TABLES: dict[object, Tensor] = {}


@functools.lru_cache
def _causal(size: int, device: torch.device) -> Tensor:
    return torch.tril(torch.ones(size, size, device=device))


class Two(nn.Module):
    """Two stages that read the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mask = nn.Linear(4, 4), nn.Linear(4, 4), None

    def table(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) @ self.table(x)
        with bp.Block(stage=1):
            return self.b(h) @ self.table(h)


class Cached(Two):
    def table(self, x: Tensor) -> Tensor:
        return _causal(4, x.device)


class Lazy(Two):
    def table(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((4, 4), 0.5, device=x.device).triu_()
        return self.mask


class InADict(Two):
    def table(self, x: Tensor) -> Tensor:
        if id(self) not in TABLES:
            table = torch.zeros(4, 4, device=x.device)
            table[:, 0::2] = torch.arange(4.0, device=x.device)[:, None].sin()
            table[:, 1::2] = torch.arange(4.0, device=x.device)[:, None].cos()
            TABLES[id(self)] = table
        return TABLES[id(self)]


class OfABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / 10 ** torch.arange(4.0))

    def table(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.outer(torch.arange(4.0, device=x.device), self.inverse).cos()
        return self.mask


class OnceComputed(Two):
    @functools.cached_property
    def of_length(self) -> Tensor:
        return torch.eye(4, device=self.a.weight.device) * 2

    def table(self, x: Tensor) -> Tensor:
        return self.of_length


class Rotates(nn.Module):
    """A module that makes its table at its first call, and hands it out."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.linspace(0, 1, 4, device=x.device)
        return self.kept


class HandedOn(Two):
    """The table is made in a sealed module of the first stage, and passed along."""

    def __init__(self) -> None:
        super().__init__()
        self.rotates = Rotates()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            table = self.rotates(x)
            h = self.a(x) * table
        with bp.Block(stage=1):
            return self.b(h) * table


class Several(Two):
    """A table for each layer, all made at one place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if not self.slopes:
                self.slopes = [torch.full((4,), 0.5 + i, device=x.device) for i in range(2)]
            h = self.a(x) * self.slopes[0]
        with bp.Block(stage=1):
            return self.b(h) * self.slopes[1]


class MadeOnTheWay(Two):
    """The second stage makes its own table of the first stage's."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            first = _causal(4, x.device)
            h = self.a(x) @ first
        with bp.Block(stage=1):
            if self.mask is None:
                self.mask = first * 0.5
            h = self.b(h) @ self.mask
        with bp.Block(stage=0):
            return h @ self.mask


KINDS = [Cached, Lazy, InADict, OfABuffer, OnceComputed, HandedOn, Several, MadeOnTheWay]


def _trains_as_plain(net: nn.Module, size: int = 8, **options: object) -> None:
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    loss_fn = nn.functional.mse_loss
    for _ in range(3):
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, loss_fn, 4))
    assert_same_gradients(net, plain)


@each_value(
    kind=KINDS,
    schedule=SCHEDULES,
)
def test_a_table_that_is_made_once_is_everybodys(kind: type[nn.Module], schedule: str):
    """It belonged to the micro-batch that had made it, and every step was refused."""
    _causal.cache_clear()
    TABLES.clear()
    _trains_as_plain(kind(), schedule=schedule)


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_stage_by_itself(kind: type[nn.Module]):
    _causal.cache_clear()
    TABLES.clear()
    _trains_as_plain(kind(), isolate=True)


def test_a_table_that_a_recording_for_real_has_cached():
    class ReadsValues(Cached):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + float(x.max()))

    _causal.cache_clear()
    net = ReadsValues().to(stages(1)[0])
    _trains_as_plain(net)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    net = Lazy()
    plain = copy.deepcopy(net)
    pipe, x = bp.Pipeline(net, devices=stages(2), chunks=4), torch.randn(8, 4)
    with mode():
        expected = plain.to(stages(1)[0])(x.to(stages(1)[0]))
        for _ in range(3):
            assert_close(pipe(x), expected)


def test_a_table_of_another_length_is_made_anew():
    class ByLength(Two):
        def table(self, x: Tensor) -> Tensor:
            if self.mask is None or len(self.mask) != x.shape[1]:
                self.mask = torch.arange(float(x.shape[1]), device=x.device)[:, None]
            return self.mask

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x) * self.table(x)
            with bp.Block(stage=1):
                return self.b(h) * self.table(h)

    net = ByLength()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for length in (3, 5, 5, 3):
        x = torch.randn(8, length, 4)
        found = pipe.forward_backward(x, loss_fn=torch.sum)
        assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))


class _BySize(Two):
    """A table for each size of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        with bp.Block(stage=0):
            if size not in self.tables:
                self.tables[size] = torch.arange(1.0, 1 + size, device=x.device)[:, None]
            h = self.a(x) * self.tables[size]
        with bp.Block(stage=1):
            return self.b(h) * self.tables[size]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", [(4, 4), (6, 4, 5)])
def test_a_table_for_each_size_may_be_made_within_one_step(schedule, sizes):
    """The third of the micro-batches, of 2, 1 and 1 rows, was refused the second one's table."""
    net = _BySize()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule=schedule)
    for size in sizes:
        x = torch.randn(size, 4)
        expected = plain_step(plain, (x,), {}, None, square, 3)
        assert_close(pipe.forward_backward(x, loss_fn=square).loss, expected)
    assert_same_gradients(net, plain)


class _OfTheLastSize(Two):
    """It keeps one table. The second stage reads what is there, late."""

    made = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.mask is None or len(self.mask) != len(x):
                self.mask = torch.arange(1.0, 1 + len(x), device=x.device)[:, None]
                self.made.set()
            h = self.a(x) * self.mask
        with bp.Block(stage=1):
            self.made.wait(0.05)
            return self.b(h) * self.mask


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_table_from_an_earlier_step_is_not_that_of_a_later_micro_batch(schedule):
    """The first micro-batch, of 2 rows, made none, and its second stage read one for 1 row."""
    net = _OfTheLastSize()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule=schedule)
    for size in (6, 4):
        x = torch.randn(size, 4)
        expected = plain_step(plain, (x,), {}, None, square, 3)
        net.made.clear()
        try:
            loss = pipe.forward_backward(x, loss_fn=square).loss
        except StateError:
            return
        assert_close(loss, expected)


class _Anew(Two):
    """Every micro-batch makes a table of its own and leaves it for the next stage."""

    def __init__(self, grows: float) -> None:
        super().__init__()
        self.calls, self.grows = 0, grows

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            self.mask = torch.full((4,), 1 + self.calls * self.grows, device=x.device)
            h = self.a(x) * self.mask
        with bp.Block(stage=1):
            return self.b(h) * self.mask


class _OfData(_Anew):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.mask = torch.full((4,), float(x.sum()), device=x.device)
        with bp.Block(stage=1):
            return self.b(h) * self.mask


class _AddsUp(_Anew):
    """One tensor that counts: each micro-batch's is computed from the one before."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.mask is None:
                self.mask = torch.zeros(4, device=x.device)
            self.mask = self.mask + 1
            h = self.a(x) * self.mask
        with bp.Block(stage=1):
            return self.b(h) * self.mask


class _ForTheNext(_Anew):
    """The second stage leaves it for the first stage of the next micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.calls:
                h = h * self.mask
        with bp.Block(stage=1):
            self.calls += 1
            self.mask = torch.full((4,), float(self.calls), device=x.device)
            return self.b(h)


TWINS = [lambda: _Anew(0.5), lambda: _OfData(0), lambda: _AddsUp(0), lambda: _ForTheNext(0)]


def _is_right_or_refused(net: nn.Module, **options: object) -> None:
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    loss_fn = nn.functional.mse_loss
    for _ in range(4):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        expected = plain_step(plain, (x,), {}, y, loss_fn, 4)
        try:
            found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        except StateError:
            return
        assert_close(found.loss, expected)


@every_pair(
    make=TWINS,
    schedule=["1f1b", "gpipe"],
    isolate=[False, True],
)
def test_a_table_that_each_micro_batch_makes_is_its_own(make, schedule: str, isolate: bool):
    """Right where no other one has come in between, or refused; never another one's."""
    _is_right_or_refused(make(), schedule=schedule, isolate=isolate)


class _Writes(Two):
    """Makes its table in a first step, and writes to it in every later one."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write, self.is_later = write, False

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.mask is None:
                self.mask = torch.zeros(4, device=x.device)
            if self.is_later:
                self.write(self.mask, h.detach().sum(0))
        with bp.Block(stage=1):
            return self.b(h) + self.mask


WRITES = [
    lambda mask, h: mask.__setitem__(0, h[0]),
    lambda mask, h: mask[1:].copy_(h[1:]),
]


@pytest.mark.filterwarnings("ignore:chunks=1")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_table_that_a_later_forward_writes_to_is_no_constant(write, mode):
    net, x = _Writes(write), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with mode():
        for _ in range(2):
            pipe(x)
        net.is_later = True
        # A recording for real is made outside of the inference mode.
        refused = r"reads it on hops \[0, 1\]|Inplace update to inference tensor"
        with pytest.raises((StateError, RecordingError), match=refused):
            pipe(x)


@pytest.mark.filterwarnings("ignore:chunks=1")
@pytest.mark.parametrize("write", WRITES)
def test_one_micro_batch_may_write_to_such_a_table(write):
    net, x = _Writes(write), torch.randn(2, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=1)
    with torch.no_grad():
        pipe(x)
        net.is_later = True
        found = host(pipe(x))
        plain = copy.deepcopy(pipe.unplace()).to(stages(1)[0])
        plain.mask = torch.zeros(4, device=stages(1)[0])
        assert_close(found, host(plain(x.to(stages(1)[0]))))


def test_a_random_table_that_is_made_once_is_everybodys():
    class Random(Two):
        def table(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.randn(4, 4, device=x.device)
            return self.mask

    losses = []
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        net = Random()
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        for _ in range(2):
            result = pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
        losses.append(result.loss)
    assert_close(losses[0], losses[2])
    assert_close(losses[1], losses[2])
