"""Writes to memory that another micro-batch still needs, where no torch function shows them."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import batch_norm, mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.arange(32.0).view(8, 4) / 32


class Squares(Function):
    """Keeps what it needs in memory that all micro-batches share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: "Keeps") -> Tensor:
        net.write(net, x.detach())
        ctx.net = net
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * ctx.net.kept * gradients[0], None


class Keeps(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.register_buffer("kept", torch.zeros(2, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.table = {"kept": self.kept}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = Squares.apply(self.a(x), self)
        with bp.Block(stage=1):
            time.sleep(0.002)
            return self.b(h)


def _out(net: Any, x: Tensor) -> None:
    torch.mul(x, 1.0, out=net.kept)


def _view(net: Any, x: Tensor) -> None:
    net.kept[: len(x)].copy_(x)


def _table(net: Any, x: Tensor) -> None:
    net.table["kept"].copy_(x)


WRITES: list[Callable[[Any, Tensor], Any]] = [
    lambda net, x: net.kept.copy_(x),
    _out,
    _view,
    _table,
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_a_custom_function_writes_for_its_backward_is_refused(
    write: Callable[[Any, Tensor], Any], schedule: str
) -> None:
    pipe = bp.Pipeline(Keeps(write), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"the forward changes buffer 'kept' on hops \[0\]"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _normalize(net: Any, x: Tensor) -> None:
    batch_norm(x, net.mean, net.spread, training=True)


def _count(net: Any, x: Tensor) -> None:
    net.mean.add_(x.mean(0))


@pytest.mark.parametrize("write", [_normalize, _count])
def test_what_no_backward_reads_a_custom_function_may_write(
    write: Callable[[Any, Tensor], Any],
) -> None:
    torch.manual_seed(0)
    net = Keeps(write)
    torch.manual_seed(0)
    plain = Keeps(write)
    expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    assert_close(pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss, expected)
    assert_close(net.mean, plain.mean)
    assert_close(net.spread, plain.spread)


class Packs(nn.Module):
    """Hooks keep what autograd saves, in memory of their own."""

    def __init__(self, *, fresh: bool) -> None:
        super().__init__()
        self.a, self.b, self.fresh = nn.Linear(4, 4), nn.Linear(4, 4), fresh
        self.memory, self.used = [torch.zeros(2, 4) for _ in range(8)], 0

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.shape != (2, 4) or tensor.device.type != "cpu":
            return tensor
        kept = torch.empty(2, 4) if self.fresh else self.memory[self.used]
        self.used += 1
        kept.copy_(tensor.detach())
        return kept

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.used = 0
            with saved_tensors_hooks(self.pack, lambda kept: kept):
                h = self.a(x).tanh()
                h = h * h.sin()
        with bp.Block(stage=1):
            time.sleep(0.002)
            return self.b(h)


@pytest.mark.cpu("there is nothing on the host to keep")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_memory_that_hooks_use_again_is_refused(schedule: str) -> None:
    pipe = bp.Pipeline(Packs(fresh=False), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match="what hooks on saved tensors have kept of it"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_memory_that_hooks_make_each_time_is_the_micro_batchs_own(schedule: str) -> None:
    torch.manual_seed(0)
    net = Packs(fresh=True)
    torch.manual_seed(0)
    plain = Packs(fresh=True)
    expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    assert_close(pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss, expected)
    assert_same_gradients(net, plain)


class Totals(nn.Module):
    """A stage adds up its activations, beginning with the first one itself."""

    def __init__(self, add: Callable[[Any, Tensor], None], stage: int, *, real: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.add, self.stage, self.real = add, stage, real
        self.total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                time.sleep(0.002 * i)
                x = layer(x)
                if i == self.stage:
                    self.add(self, x)
                if self.real and bool((x.detach().sum() > 1e6).any()):
                    x = x * 2
                x = x + 1
        return x


def _in_place(net: Any, h: Tensor) -> None:
    if net.total is None:
        net.total = h.detach()
    else:
        net.total += h.detach()


def _by_view(net: Any, h: Tensor) -> None:
    if net.total is None:
        net.total = h.data[:2]
    else:
        net.total.mul_(0.9).add_(h.detach(), alpha=0.1)


def _copied(net: Any, h: Tensor) -> None:
    net.total = h.detach().clone() if net.total is None else net.total.add_(h.detach())


def _anew(net: Any, h: Tensor) -> None:
    net.total = h.detach() if net.total is None else net.total + h.detach()


class Crosses(Totals):
    """What is added up is what crosses."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                time.sleep(0.002 * i)
                x = layer(x + 1)
                if self.real and bool((x.detach().sum() > 1e6).any()):
                    x = x * 2
                if i == self.stage:
                    self.add(self, x)
        return x


@pytest.mark.parametrize("add", [_in_place, _by_view])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("real", [False, True])
def test_a_total_that_begins_with_what_crosses_is_refused(
    add: Callable[[Any, Tensor], None], stage: int, real: bool
) -> None:
    pipe = bp.Pipeline(Crosses(add, stage, real=real), devices=stages(3), chunks=4)
    with pytest.raises(StateError, match=r"that the one before has kept.*tensor\.clone\(\)"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize(
    ("kind", "add"), [(Crosses, _copied), (Crosses, _anew), (Totals, _in_place)]
)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("real", [False, True])
def test_other_totals_are_the_plain_loops(
    kind: type[Totals], add: Callable[[Any, Tensor], None], stage: int, real: bool
) -> None:
    """So is one of what no other stage reads."""
    torch.manual_seed(0)
    net = kind(add, stage, real=real)
    torch.manual_seed(0)
    plain = kind(add, stage, real=real)
    expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    assert_close(pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss, expected)
    assert net.total is not None
    assert plain.total is not None
    assert_close(net.total, plain.total)


class Table(nn.Module):
    def __init__(self, show: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.show = nn.Linear(4, 4), nn.Linear(4, 4), show

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            table.mul_(0.9)
            shown = self.show(table)
        with bp.Block(stage=1):
            time.sleep(0.002)
            return self.b(h) + shown


@pytest.mark.cpu("it is found when it has happened")
def test_a_view_of_an_argument_that_all_micro_batches_write_is_refused() -> None:
    pipe = bp.Pipeline(
        Table(lambda t: t[0][None]), devices=stages(2), chunks=4, batch_dims={"table": None}
    )
    table = torch.ones(5, 4, device=stages(2)[0])
    with pytest.raises(StateError, match="goes whole to every micro-batch, and the forward writes"):
        pipe.forward_backward(X, table, target=X, loss_fn=mse_loss)


def test_a_copy_of_such_an_argument_crosses() -> None:
    net = Table(lambda t: t[0][None].clone())
    table = torch.ones(5, 4, device=stages(2)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, batch_dims={"table": None})
    assert pipe.forward_backward(X, table, target=X, loss_fn=mse_loss).loss.isfinite()
    assert_close(table, torch.full((5, 4), 0.9**4, device=table.device))


class Lazy(Function):
    """Makes its memory at the first call, and keeps it for all."""

    memory: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Lazy.memory is None or Lazy.memory.shape != x.shape:
            Lazy.memory = torch.empty_like(x)
        torch.sigmoid(x, out=Lazy.memory)
        time.sleep(0.002)
        ctx.save_for_backward(x)
        return x * Lazy.memory

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


class Applies(nn.Module):
    """Applies it on one stage, or on both."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.a, self.b, self.both = nn.Linear(4, 4), nn.Linear(4, 4), both

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = Lazy.apply(self.a(x))
        with bp.Block(stage=1):
            h = self.b(h)
            return Lazy.apply(h) if self.both else h


@pytest.fixture(autouse=True)
def _no_memory() -> None:
    Lazy.memory = None


def test_memory_that_functions_of_two_stages_make_at_the_first_call_is_refused() -> None:
    pipe = bp.Pipeline(Applies(both=True), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"on hops \[0, 1\]"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def test_memory_that_a_function_of_one_stage_makes_at_the_first_call_is_its_own() -> None:
    torch.manual_seed(0)
    net = Applies(both=False)
    torch.manual_seed(0)
    plain = Applies(both=False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
        assert_close(pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss, expected)
    assert_same_gradients(net, plain)


class ByMean(Function):
    """Reads a buffer that is none of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any) -> Tensor:
        ctx.scale = 1 / (1 + net.mean)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scale, None


class ReadsInside(nn.Module):
    """The first stage keeps a mean, which the second one reads in a function, or in a hook."""

    def __init__(self, *, by_hook: bool, writes: bool) -> None:
        super().__init__()
        self.a, self.b, self.by_hook, self.writes = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            by_hook,
            writes,
        )
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.writes:
                self.mean.mul_(0.5).add_(h.detach().mean(0))
        with bp.Block(stage=1):
            if not self.by_hook:
                return self.b(ByMean.apply(h, self))
            with saved_tensors_hooks(lambda t: t * (1 + self.mean.mean()), lambda t: t):
                return self.b(h)


@pytest.mark.cpu("the buffer is on the first stage's device alone")
@pytest.mark.parametrize("by_hook", [False, True])
def test_a_buffer_that_is_read_where_no_function_shows_it_is_refused(by_hook: bool) -> None:
    net = ReadsInside(by_hook=by_hook, writes=True)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="'mean' is written by the forward and read on hops"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.cpu("the buffer is on the first stage's device alone")
def test_a_buffer_that_nobody_writes_may_be_read_there() -> None:
    torch.manual_seed(0)
    net = ReadsInside(by_hook=False, writes=False)
    torch.manual_seed(0)
    plain = ReadsInside(by_hook=False, writes=False)
    expected = plain_step(plain, (X,), {}, X, mse_loss, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    assert_close(pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss, expected)
    assert_same_gradients(net, plain)


class LazyMask(Function):
    """Keeps a mask for its backward, in memory that it makes at the first call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any) -> Tensor:
        if net.mask is None:
            net.mask = torch.empty_like(x)
        net.mask.copy_((x.detach() > 0).to(x.dtype))
        ctx.net = net
        return x * net.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.net.mask, None


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = LazyMask.apply(self.a(x), self)
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_mask_in_memory_that_the_first_call_makes_is_refused(schedule: str) -> None:
    pipe = bp.Pipeline(Masked(), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match="an earlier micro-batch|under way at once"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
