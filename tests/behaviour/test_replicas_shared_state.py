"""State that copies of a pipeline have in common: they run one after the other, as micro-batches do
in the plain loop."""

import copy
import itertools
import pickle
import random
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.replicas import Replicas

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

COUNTS = {"calls": 0}


class Settings:
    """A class with numbers."""

    calls, is_on, scale = 0, False, 1.0


class Net(nn.Module):
    """Computes something between its two layers."""

    def __init__(self, between=lambda x: x) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        with bp.Block(stage=0):
            h = self.between(self.a(x))
        with bp.Block(stage=1):
            return self.b(h)


def _global():
    COUNTS["calls"] = 0

    def between(x):
        COUNTS["calls"] += 1
        return x * COUNTS["calls"]

    return Net(between), F.mse_loss


def _of_class():
    Settings.calls = 0

    def between(x):
        Settings.calls += 1
        return x * Settings.calls

    return Net(between), F.mse_loss


def _for_a_while():
    def between(x):
        Settings.scale = 2.0
        try:
            return torch.relu(x) * Settings.scale
        finally:
            Settings.scale = 1.0

    return Net(between), F.mse_loss


def _switch():
    def between(x):
        torch.set_default_dtype(torch.float64)
        try:
            return x * torch.ones(4).sum().to(x.dtype)
        finally:
            torch.set_default_dtype(torch.float32)

    return Net(between), F.mse_loss


def _hook():
    net, scales = Net(), [1.0]

    def hook(module, args, output):
        scales[0] *= 0.9
        return output * scales[0]

    net.a.register_forward_hook(hook)
    return net, F.mse_loss


def _tensor():
    mean = torch.ones(1)

    def between(x):
        mean.mul_(0.9).add_(x.detach().mean().cpu())
        return x * mean.clone().to(x.device)

    return Net(between), F.mse_loss


def _drawn_by(draw):
    return Net(lambda x: x * float(draw())), F.mse_loss


def _deque():
    last = deque([0.0] * 3, maxlen=3)

    def between(x):
        last.append(last[0] + 1)
        return x * (1 + sum(last))

    return Net(between), F.mse_loss


def _loss_counts():
    calls = [0]

    def loss_fn(output, target):
        calls[0] += 1
        return F.mse_loss(output, target) * calls[0]

    return Net(), loss_fn


class Averages(nn.Module):
    """A loss with a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        self.mean.mul_(0.9).add_(output.detach().mean() * 0.1)
        return F.mse_loss(output, target) * self.mean.clone()


def _loss_draws():
    generator = torch.Generator().manual_seed(0)

    def loss_fn(output, target):
        noise = torch.randn(output.shape, generator=generator).to(output.device)
        return F.mse_loss(output + noise, target)

    return Net(), loss_fn


MADE = {
    "global": _global,
    "class": _of_class,
    "for a while": _for_a_while,
    "switch": _switch,
    "hook": _hook,
    "tensor": _tensor,
    "generator": lambda: _drawn_by(random.Random(0).random),
    "numpy": lambda: _drawn_by(np.random.default_rng(0).random),
    "iterator": lambda: _drawn_by(itertools.count(1).__next__),
    "deque": _deque,
    "loss": _loss_counts,
    "module of the loss": lambda: (Net(), Averages()),
    "generator of the loss": _loss_draws,
}


@pytest.mark.parametrize("name", MADE)
def test_state_that_copies_share_is_that_of_one_pipeline(name, monkeypatch):
    """Whatever keeps it: no two copies run at the same time."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses = []
    for copies in (1, 2):
        torch.manual_seed(0)
        net, loss_fn = MADE[name]()
        many = Replicas(net, [["cpu"] * 2] * copies, chunks=4 // copies, schedule="sequential")
        running = _overlaps(many, monkeypatch)
        found = [many.forward_backward(x, target=y, loss_fn=loss_fn).loss for _ in range(4)]
        losses.append(torch.stack(found))
        assert running == [0]
    assert_close(*losses, rtol=1e-4, atol=1e-5)


def _overlaps(many, monkeypatch):
    """Count how often copies are started at the same time."""
    found = [0]
    share = many._share_of_threads

    def counted(copies):
        found[0] += 1
        return share(copies)

    monkeypatch.setattr(many, "_share_of_threads", counted)
    return found


def test_copies_that_share_nothing_overlap(monkeypatch):
    """Also where the model counts, or the loss reads what others have set."""
    net, factors = Net(), {"factor": 2.0}
    net.between = Counts()
    two = Replicas(net, [["cpu"] * 2] * 2, chunks=2)
    overlaps = _overlaps(two, monkeypatch)

    def loss_fn(output, target):
        return F.mse_loss(output, target) * factors["factor"]

    for _ in range(3):
        two.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=loss_fn)
    assert overlaps == [2]


class Counts(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def test_another_kind_of_call_is_looked_at_anew(monkeypatch):
    """A loss that keeps something, or dropout, that comes after steps that overlapped."""
    net = Net(nn.Dropout(0.0))
    two = Replicas(net, [["cpu"] * 2] * 2, chunks=2)
    overlaps, x = _overlaps(two, monkeypatch), torch.randn(8, 4)
    for _ in range(2):
        two.forward_backward(x, target=x, loss_fn=F.mse_loss)
    assert overlaps == [1]
    _, loss_fn = _loss_counts()
    for _ in range(3):
        two.forward_backward(x, target=x, loss_fn=loss_fn)
    assert overlaps == [1]
    two.forward_backward(x, target=x, loss_fn=F.mse_loss)
    assert overlaps == [2]
    net.between.p = 0.5
    for _ in range(2):
        two.forward_backward(x, target=x, loss_fn=F.mse_loss)
    assert overlaps == [2]


def test_an_argument_that_the_forward_writes_to_is_written_in_order(monkeypatch):
    """The caller's own tensor: it goes whole to every copy."""

    class Keeps(Net):
        def forward(self, x, mean):
            with bp.Block(stage=0):
                h = self.a(x)
                mean.mul_(0.5).add_(h.detach().mean())
                h = h * mean.clone()
            with bp.Block(stage=1):
                return self.b(h)

    x, means = torch.randn(8, 4), []
    torch.manual_seed(0)
    net = Keeps()
    for copies in (1, 2):
        many = Replicas(net, [["cpu"] * 2] * copies, chunks=4 // copies)
        overlaps, mean = _overlaps(many, monkeypatch), torch.ones(())
        for _ in range(3):
            many.forward_backward(x, mean, loss_fn=torch.sum)
        assert overlaps == [0]
        means.append(mean)
    assert_close(*means)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda many: pickle.loads(pickle.dumps(many))])
def test_replicas_are_copied_and_pickled_after_steps(copied):
    """With one set of parameters, of which their copies are made anew."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    net = Net(nn.ReLU())
    two = Replicas(net, [["cpu"] * 2] * 2, chunks=2)
    for _ in range(2):
        two.forward_backward(x, target=y, loss_fn=F.mse_loss)
    net.zero_grad()
    others = copied(two)
    for many in (two, others):
        many.forward_backward(x, target=y, loss_fn=F.mse_loss)
    assert others.pipes[0].module is others.module
    assert others.module is not net
    for one, other in zip(net.parameters(), others.parameters(), strict=True):
        assert_close(one.grad, other.grad)


class Leaves(nn.Module):
    """Leaves something for the loss, beside what it returns."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean, self.means = 0.0, list[Tensor]()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            out = self.b(h)
            self.mean = out.detach().abs().mean()
            self.means.append(out.abs().mean())
            self.count += 1
            return out

    def of_list(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out, y) + sum(self.means)
        self.means.clear()
        return loss

    def of_attribute(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.mean

    def of_buffer(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.count

    def of_parameters(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + 0.1 * sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize("loss", ["of_list", "of_attribute", "of_buffer"])
def test_a_loss_that_reads_what_the_forward_leaves_is_refused(loss: str):
    """Attack 24: the copies' losses read what the first one's forward had left."""
    net, device = Leaves(), stages(1)[0]
    both = Replicas(net, [[device] * 2] * 2, chunks=1)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(StateError, match="reads what the forward sets"):
        both.forward_backward(x, target=y, loss_fn=getattr(net, loss))


def test_a_loss_reads_parameters_in_replicas():
    """They have the same values in each copy."""
    device = stages(1)[0]
    net = Leaves().to(device)
    plain = copy.deepcopy(net)
    both = Replicas(net, [[device] * 2] * 2, chunks=2)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        loss = both.forward_backward(x, target=y, loss_fn=net.of_parameters).loss
        expected = plain_step(plain, (x.to(device),), {}, y, plain.of_parameters, 4)
        assert_close(loss, expected)
        assert_same_gradients(net, plain)
