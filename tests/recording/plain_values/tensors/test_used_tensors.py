"""Expressions, by which branches that were not taken would write to a tensor, or read it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import assert_close, stages

TABLES = [torch.zeros(4)]


class Net(nn.Module):
    """Its first stage reads a memory, and the second one does something for some data."""

    def __init__(self, use: Callable[["Net", Tensor], None]) -> None:
        super().__init__()
        self.first, self.second, self._use = nn.Linear(4, 4), nn.Linear(4, 4), use
        self.norm, self.rows = nn.BatchNorm1d(4), nn.Embedding(4, 4, max_norm=1.0)
        self.register_buffer("memory", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh() + self.memory + self.norm.running_mean + TABLES[0]
            h = h + self.rows.weight.detach() + self.first.weight.detach()
        with bp.Block(stage=1):
            h = self.second(h)
            if h.mean() > 100:
                self._use(self, h)
            return h


def _alias(net: Net, h: Tensor) -> None:
    memory = net.memory
    memory += h.mean()


def _loop(net: Net, h: Tensor) -> None:
    for buffer in net.buffers():
        buffer.mul_(0.9)


def _pairs(net: Net, h: Tensor) -> None:
    for mine, other in zip(net.first.parameters(), net.second.parameters(), strict=True):
        mine.data.lerp_(other.data, 0.1)


def _one_of_two(net: Net, h: Tensor) -> None:
    chosen = net.memory if h.max() > 200 else net.variance
    chosen.zero_()


def _data(net: Net, h: Tensor) -> None:
    weight = net.first.weight.data
    if h.max() > 200:
        weight *= 0.9


def _some_of_all(net: Net, h: Tensor) -> None:
    for parameter in (net.first.weight, net.second.weight):
        if h.max() > 200:
            parameter.data.mul_(0.9)


def _part(net: Net, h: Tensor) -> None:
    net.memory.data[0] = h.mean()


def _adds(net: Net, h: Tensor) -> None:
    net.memory += h.mean()


def _assigns_data(net: Net, h: Tensor) -> None:
    net.memory.data = h.detach().mean(0)


def _own_function(net: Net, h: Tensor) -> None:
    _halve(net.memory)


def _halve(tensor: Tensor) -> None:
    tensor.view(-1).mul_(0.5)


def _log(net: Net, h: Tensor) -> None:
    print(net.memory)


WRITES = {
    "method": lambda net, h: net.memory.mul_(0.5),
    "method, copy": lambda net, h: net.memory.copy_(h.detach().mean(0)),
    "of a view": lambda net, h: net.memory.view(2, 2)[0].t().add_(1),
    "of data": lambda net, h: net.first.weight.data.mul_(0.9),
    "of detach": lambda net, h: net.first.weight.detach().clamp_(-1, 1),
    "of a global": lambda net, h: TABLES[0].add_(1),
    "out": lambda net, h: torch.mean(h.detach(), 0, out=net.memory),
    "init": lambda net, h: nn.init.normal_(net.memory),
    "inplace": lambda net, h: F.relu(net.memory, inplace=True),
    "foreach": lambda net, h: torch._foreach_mul_([net.memory, net.variance], 0.5),
    "unbound": lambda net, h: Tensor.mul_(net.memory, 0.5),
    "module": lambda net, h: net.norm(h),
    "embedding": lambda net, h: net.rows(torch.arange(4)),
    "batch_norm": lambda net, h: F.batch_norm(h, net.memory, net.variance, training=True),
    **{
        use.__name__: use
        for use in (
            *(_alias, _loop, _pairs, _one_of_two, _data, _some_of_all, _part, _adds),
            *(_assigns_data, _own_function),
        )
    },
}
READS = {
    "value": lambda net, h: net.memory.sum().item(),
    "operator": lambda net, h: h + net.memory,
    "clone": lambda net, h: net.memory.clone().mul_(0.5),
    "argument": lambda net, h: F.mse_loss(h, net.memory.expand_as(h)),
}
QUESTIONS = {
    "shape": lambda net, h: net.memory.shape,
    "size": lambda net, h: net.memory.size(0),
    "len": lambda net, h: len(net.memory),
    "dtype": lambda net, h: h.to(net.memory.dtype),
    "type": lambda net, h: isinstance(net.memory, Tensor),
    "is": lambda net, h: net.memory is None,
    "log": _log,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_in_a_branch_that_was_not_taken_is_refused(
    write: Callable[[Net, Tensor], None],
) -> None:
    pipe = bp.Pipeline(Net(write), devices=stages(2), chunks=2)
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"the forward changes .* and reads it on hops \[0"):
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)


class Averages(Net):
    """Its first stage writes the memory."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh()
            self.memory.lerp_(h.detach().mean(0), 0.1)
            h = h + self.memory
        with bp.Block(stage=1):
            h = self.second(h)
            if h.mean() > 100:
                self._use(self, h)
            return h


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_what_another_stage_writes_is_refused(
    read: Callable[[Net, Tensor], None],
) -> None:
    pipe = bp.Pipeline(Averages(read), devices=stages(2), chunks=2)
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"the forward changes buffer 'memory' on hops \[0\]"):
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_about_what_it_is_is_not(ask: Callable[[Net, Tensor], None]) -> None:
    torch.manual_seed(0)
    net, plain = Averages(ask), Averages(ask)
    plain.load_state_dict(net.state_dict())
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    expected = plain_step(plain, (x,), {}, x, F.mse_loss, 2)
    assert_close(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss, expected)
    assert_same_gradients(net, plain)
    assert_close(net.memory, plain.memory)


def test_a_variable_that_named_a_parameter_before_is_not_that() -> None:
    class Starts(Net):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.first.bias
                h = self.first(x) + h
            with bp.Block(stage=1):
                h = self.second(h)
                if h.mean() > 100:
                    h.mul_(0.5)
                return h

    torch.manual_seed(0)
    net, plain = Starts(_log), Starts(_log)
    plain.load_state_dict(net.state_dict())
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    expected = plain_step(plain, (x,), {}, x, F.mse_loss, 2)
    assert_close(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss, expected)
    assert_same_gradients(net, plain)
