"""Tensors that outlive the forward, in branches that the recorded micro-batch did not take."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import BlockpipeError, StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import assert_close, stages

Act = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Each stage does something, always or for wild data alone."""

    def __init__(self, *acts: Act, wild: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(4))
        self.plain, self.norm = torch.zeros(4), nn.BatchNorm1d(4)
        self._acts, self._wild, self.calls, self.uses = acts, wild, 0, True

    def forward(self, x: Tensor) -> Tensor:
        is_wild = bool(x.max() > 5)
        with bp.Block(stage=0):
            h = self.first(x)
            if is_wild or not self._wild[0]:
                h = self._acts[0](self, h)
        with bp.Block(stage=1):
            h = self.second(h)
            if is_wild or not self._wild[1]:
                h = self._acts[1](self, h)
            return h


def _reads(net: Net, h: Tensor) -> Tensor:
    return h + net.memory


def _writes(net: Net, h: Tensor) -> Tensor:
    net.memory.mul_(0.5).add_(h.detach().mean(0))
    return h


def _writes_data(net: Net, h: Tensor) -> Tensor:
    net.memory.data.mul_(0.5).add_(h.detach().mean(0))
    return h


def _reads_plain(net: Net, h: Tensor) -> Tensor:
    return h + net.plain.to(h.device)


def _writes_plain(net: Net, h: Tensor) -> Tensor:
    net.plain.mul_(0.5).add_(h.detach().mean(0).cpu())
    return h


def _reads_weight(net: Net, h: Tensor) -> Tensor:
    return h @ net.first.weight.detach()


def _shrinks_weight(net: Net, h: Tensor) -> Tensor:
    net.first.weight.data.mul_(0.9)
    return h


def _normalizes(net: Net, h: Tensor) -> Tensor:
    return net.norm(h)


def _reads_statistics(net: Net, h: Tensor) -> Tensor:
    return h + net.norm.running_mean


def _nothing(net: Net, h: Tensor) -> Tensor:
    return h


PAIRS = [
    *((_reads, _writes), (_reads, _writes_data), (_reads_plain, _writes_plain)),
    *((_reads_weight, _shrinks_weight), (_reads_statistics, _normalizes)),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("wild", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("acts", PAIRS, ids=lambda acts: acts[1].__name__)
def test_a_write_and_a_read_on_two_stages_are_refused(
    acts: tuple[Act, Act], wild: tuple[bool, bool], turned: bool
) -> None:
    """One of them is in the branch that was not taken, or both are."""
    net = Net(*(reversed(acts) if turned else acts), wild=wild)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"use schedule='(uncut|sequential)'"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def _hook_writes(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: [net.plain.mul_(0.5).add_(gradient.mean(0).cpu())].clear())
    return h


def _hook_reads(net: Net, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * net.plain.to(gradient.device))
    return h


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("acts", [(_hook_writes, _reads_plain), (_hook_reads, _writes_plain)])
def test_hooks_of_one_stage_and_a_branch_of_another_are_refused(
    acts: tuple[Act, Act], turned: bool
) -> None:
    wild = (turned, not turned)  # the hook is there always
    net = Net(*(reversed(acts) if turned else acts), wild=wild)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule="gpipe")
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match="in a backward"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def _hook_writes_unseen(net: Net, h: Tensor) -> Tensor:
    h.register_hook(
        lambda gradient: [net.plain.data.mul_(0.5).add_(gradient.mean(0).cpu())].clear()
    )
    return h


@pytest.mark.parametrize("write", [_hook_writes, _hook_writes_unseen])
def test_a_hook_and_a_branch_of_one_stage_are_refused_unless_backwards_come_at_once(
    write: Act,
) -> None:
    def act(net: Net, h: Tensor) -> Tensor:
        if h.mean() > 5:
            h = _reads_plain(net, h)
        return write(net, h)

    torch.manual_seed(0)
    net, plain = (Net(_nothing, act, wild=(True, False)) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    late, pipe = (
        bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule=s) for s in ("gpipe", "1f1b")
    )
    with pytest.raises(StateError, match="the forward may read a tensor of shape"):
        late.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)
    for shift in (0.0, 60.0, -60.0):
        x = torch.randn(8, 4) + shift
        net.zero_grad(), plain.zero_grad()
        expected = plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_close(pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss, expected)
        assert_same_gradients(net, plain)
    assert_close(net.plain, plain.plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("write", [_writes, _writes_data])
def test_what_one_stage_alone_writes_is_as_in_the_plain_loop(write: Act, schedule: str) -> None:
    def act(net: Net, h: Tensor) -> Tensor:
        h = h + net.memory
        return write(net, h) if h.abs().max() > 5 else h

    torch.manual_seed(0)
    net, plain = (Net(_nothing, act, wild=(True, False)) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for shift in (0.0, 60.0):
        x = torch.randn(8, 4) + shift
        net.zero_grad(), plain.zero_grad()
        expected = plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_close(pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss, expected)
        assert_same_gradients(net, plain)
    assert_close(net.memory, plain.memory)


@pytest.mark.parametrize("schedule", ["sequential", "uncut"])
def test_micro_batches_one_by_one_are_not_refused(schedule: str) -> None:
    pipe = bp.Pipeline(Net(_reads, _writes), devices=stages(2), chunks=4, schedule=schedule)
    x = torch.randn(8, 4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def test_both_lines_are_named() -> None:
    pipe = bp.Pipeline(Net(_reads, _writes), devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    read, write = (act.__code__.co_firstlineno + 1 for act in (_reads, _writes))
    with pytest.raises(StateError, match=rf"py:{write}\), and reads it .*py:{read}\)"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class InTraining(Net):
    """Its second stage writes what the first one reads, on conditions that no data decides."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x) + self.memory
        with bp.Block(stage=1):
            h = self.second(h)
            if h.mean() > 100:
                h = h * 2
            if not self.training:
                self.memory.mul_(0.5)
            if scale is not None:
                self.memory.mul_(scale)
            if self.uses is False and h.max() > 1:
                self.memory.zero_()
            return h


def test_a_condition_that_no_data_decides_keeps_a_branch_closed() -> None:
    torch.manual_seed(0)
    net, plain = InTraining(), InTraining()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    expected = plain_step(plain, (x,), {}, x, mse_loss, 4)
    assert_close(pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss, expected)
    assert_same_gradients(net, plain)


def test_a_condition_that_is_set_between_steps_opens_it() -> None:
    net = InTraining()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    net.uses = False
    with pytest.raises(StateError, match=r"buffer 'memory'"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Counts(Net):
    """Its second stage counts, and writes now and then: it reads no data."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x) + self.memory
        with bp.Block(stage=1):
            h = self.second(h)
            self.calls += 1
            if self.calls % 100 == 0:
                self.memory.mul_(0.5)
            return h


def test_a_branch_by_a_count_is_refused_on_fake_tensors_too() -> None:
    net, x = Counts(), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"buffer 'memory'"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Short(Net):
    """It reads and writes its memory for small micro-batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            if len(x) < 3:
                h = h + self.memory
        with bp.Block(stage=1):
            h = self.second(h)
            if len(x) < 3:
                self.memory.lerp_(h.detach().mean(0), 0.5)
            return h


def test_a_branch_by_size_is_never_silently_wrong() -> None:
    """Micro-batches of 3, 3, 2 and 2: the latter two would share the memory on lanes."""
    torch.manual_seed(0)
    net, plain = Short(), Short()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for size, chunks in ((12, 4), (12, 4)):
        x = torch.randn(size, 4)
        expected = plain_step(plain, (x,), {}, x, mse_loss, chunks)
        assert_close(pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss, expected)
    x = torch.randn(10, 4)
    with pytest.raises(BlockpipeError, match=r"(tensor|constant) of shape \(4,\)"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
