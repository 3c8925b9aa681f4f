"""Crossings of writes, attributes and custom functions, in residual and nested models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ..alike import DEVICE, check_alike
from ..models import Scripted
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, is_simulated, stages

B = bp.Block


class Residual(nn.Module):
    """A ResNet's block: one ReLU in place is called twice, and the sum is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.first(x)))
        side = self.side(x)
        out += side
        return self.relu(out)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("cuts", [{"relu": 1, "side": 2}, {"relu": 1}, {"side": 1}])
def test_a_stage_that_is_returned_to_after_writes_in_place_on_the_way(cuts, isolate):
    """The copies of one tensor along its way are no views of each other."""
    net = nn.Sequential(nn.Linear(4, 4), Residual())
    bp.begin_blocks(net, {f"1.{path}": stage for path, stage in cuts.items()})
    pipe = bp.Pipeline(net, devices=stages(1 + max(cuts.values())), chunks=2, isolate=isolate)
    assert pipe.verify(torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=F.mse_loss)


class Scaled(nn.Linear):
    """Reads an attribute of its argument, and sets one."""

    def forward(self, x):
        x.count = getattr(x, "count", 0) + 1
        return super().forward(x) * x.scale * x.count


def _attributes(net, x):
    with B(0):
        h = net.a(x)
        h.scale = 2.0
    with B(1):
        y = net.b(h)
        h.scale = 3.0
        y = y + net.b(h)
    with B(2):
        return net.c(y) * h.count + h * h.scale


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
def test_attributes_of_a_tensor_cross_with_it(schedule):
    """A sealed module finds what was set on its argument, and what it sets is found."""
    net = Scripted(_attributes)
    net.b = Scaled(4, 4)
    for isolate in (False, True) if schedule != "uncut" else (False,):
        check_alike(net, torch.randn(6, 4), schedule=schedule, isolate=isolate)


class Writes(nn.Module):
    """Counts in an argument that goes whole, on one stage, and may read it on another."""

    def __init__(self, stage, reads):
        super().__init__()
        self.a, self.b, self.stage, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), stage, reads

    def forward(self, x, total):
        with B(0):
            x = self.a(x)
            if self.stage == 0:
                total.add_(x.detach().sum())
        with B(1):
            if self.stage == 1:
                total.add_(x.detach().sum())
            x = self.b(x)
            return x * total if self.reads else x


@pytest.mark.parametrize("schedule", ["gpipe", "sequential"])
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(("stage", "reads"), [(0, False), (0, True), (1, False), (1, True)])
def test_an_argument_that_goes_whole_is_written_in_place(
    stage, reads, isolate, schedule, monkeypatch
):
    """Right, the caller's tensor too, or refused with the reason."""
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_OPERATION", 0)
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_HOP", 0)
    net, x, total = Writes(stage, reads), torch.randn(6, 4), torch.zeros(4, device=DEVICE)
    plain, expected = copy.deepcopy(net).to(DEVICE), total.clone()
    outputs = torch.cat([plain(part, expected) for part in x.to(DEVICE).split(2)])
    options = {"chunks": 3, "schedule": schedule, "isolate": isolate}
    pipe = bp.Pipeline(net, devices=stages(2), batch_dims={"total": None}, **options)
    under_way_at_once = schedule == "gpipe" or is_simulated()  # there a copy may be
    is_read_elsewhere = reads or stage == 1  # as an input it is the first stage's
    is_a_copy = isolate or (stage == 1 and is_simulated())
    if is_a_copy or (under_way_at_once and is_read_elsewhere):
        with pytest.raises(
            StateError, match="goes whole to every micro-batch, and the forward writes"
        ):
            pipe(x, total)
        return
    torch.testing.assert_close(pipe(x, total).cpu(), outputs.cpu())
    torch.testing.assert_close(total.cpu(), expected.cpu())


class _BeginsLater(nn.Module):
    """Does something to a crossing in glue, once it is turned on."""

    def __init__(self, does) -> None:
        super().__init__()
        self.a, self.b, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does
        self.is_on = bytearray(1)  # whose content nobody compares

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            if self.is_on[0]:
                h = self.does(self, h) + h
            return self.b(h)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _checkpointed(net: _BeginsLater, h: Tensor, *, reentrant: bool) -> Tensor:
    return torch.utils.checkpoint.checkpoint(
        lambda h: net.b(h).tanh() * h, h, use_reentrant=reentrant
    )


LATER = [
    lambda net, h: _Squares.apply(h),
    lambda net, h: _checkpointed(net, h, reentrant=False),
]


@pytest.mark.parametrize("does", LATER)
@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"schedule": "zb-h1"}])
def test_a_custom_function_or_a_checkpoint_may_begin_later(does, options: dict[str, object]):
    """Its backward went over the cut, and came to a graph that was gone."""
    net = _BeginsLater(does)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    for step in range(4):
        net.is_on[0] = plain.is_on[0] = step >= 2
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, F.mse_loss, 4))
    assert_same_gradients(net, plain)


def test_a_reentrant_checkpoint_that_begins_later_is_refused():
    net = _BeginsLater(lambda net, h: _checkpointed(net, h, reentrant=True))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    net.is_on[0] = 1
    with pytest.raises(
        CrossingError, match=r"test_later_crossings\.py:\d+\); pass use_reentrant=False"
    ):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
