"""Parameters that no module has registered, in copies of a pipeline: one value, one gradient."""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.replicas import Replicas

from ..parity import plain_step
from ..stage_devices import assert_close, is_simulated


class Holder:
    """A user's own object."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Pair(NamedTuple):
    """A tensor beside a number."""

    weight: float
    value: torch.Tensor


def _pair(value: torch.Tensor) -> Pair:
    return Pair(0.5, value)


def _partial(value: torch.Tensor) -> functools.partial[torch.Tensor]:
    return functools.partial(torch.mul, value)


def _of_a_tensor(value: torch.Tensor) -> torch.Tensor:
    found = torch.ones(1)
    found.value = value
    return found


def _value_of(part: object) -> torch.Tensor:
    if isinstance(part, functools.partial):
        return part.args[0]
    if type(part) is tuple:
        return part[1]
    return part if isinstance(part, torch.Tensor) and not hasattr(part, "value") else part.value


class Hides(nn.Module):
    """Has a part that no module registers."""

    def __init__(self, part: object) -> None:
        super().__init__()
        self.a, self.b, self.parts = nn.Linear(4, 4), nn.Linear(4, 4), [part]

    def forward(self, x):
        (part,) = self.parts
        with bp.Block(stage=0):
            h = self.a(x)
            if callable(part) and not isinstance(part, functools.partial):
                h = part(h)
            else:
                h = h * _value_of(part).to(h.device)
        with bp.Block(stage=1):
            return self.b(h)


def groups(copies: int = 2) -> list[list[str]]:
    return [["cpu"] * 2] * copies  # where the hidden parts are


def _with_gradient() -> torch.Tensor:
    found = torch.ones(4, requires_grad=True)
    found.grad = torch.ones(4)  # which copy.deepcopy copies too
    return found


PARTS = {
    "module": lambda: nn.Linear(4, 4),
    "nested": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.LayerNorm(4)),
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "tensor": _with_gradient,
    "object": lambda: Holder(nn.Parameter(torch.ones(4))),
}


def _leaves(part):
    if isinstance(part, nn.Module):
        return [*part.parameters()]
    return [part if isinstance(part, torch.Tensor) else part.value]


@pytest.mark.skipif(is_simulated(), reason="the plain loop's hidden parts would be elsewhere")
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("name", PARTS)
def test_a_hidden_parameter_trains_as_in_the_plain_loop(name, copies):
    """Its gradient is that of all shares, and the copies follow its value without being made
    anew."""
    net = Hides(PARTS[name]())
    plain = copy.deepcopy(net)
    many = Replicas(net, groups(copies), chunks=2)
    pipes = [*many.pipes]
    for _ in range(3):
        x, y = torch.randn(12, 4), torch.randn(12, 4)
        found = many.forward_backward(x, target=y, loss_fn=F.mse_loss)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, F.mse_loss, 2 * copies))
        for model in (net, plain):
            leaves = [*model.parameters(), *_leaves(model.parts[0])]
            torch.optim.SGD(leaves, lr=0.1).step()
            if model is net:
                own = leaves
        for one, other in zip(own, leaves, strict=True):
            assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
            assert_close(one, other, rtol=1e-5, atol=1e-6)
            one.grad = other.grad = None
    assert all(now is before for now, before in zip(many.pipes, pipes, strict=True))


def test_the_statistics_of_a_hidden_batch_norm_are_the_first_copys():
    """As those of one that is registered."""
    net = Hides(nn.BatchNorm1d(4))
    two = Replicas(net, groups(), chunks=2)
    for _ in range(2):
        two.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    net.parts[0].eval()
    x = torch.randn(8, 4)
    with torch.no_grad():
        assert_close(two(x), net(x))


def test_a_frozen_hidden_parameter_gets_no_gradient():
    net = Hides(nn.Linear(4, 4))
    two = Replicas(net, groups(), chunks=2)
    net.parts[0].bias.requires_grad_(False)
    two.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    assert net.parts[0].bias.grad is None
    assert net.parts[0].weight.grad is not None


def test_a_hook_on_a_hidden_parameter_is_refused():
    net = Hides(nn.Linear(4, 4))
    two = Replicas(net, groups(), chunks=2)
    net.parts[0].weight.register_hook(lambda _: None)
    with pytest.raises(UsageError, match="one that no module has registered"):
        two.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.data.mul_(2.0),
        lambda value: value.numpy().__imul__(2.0),
        lambda value: value.mul_(2.0),
    ],
    ids=["data", "numpy", "in_place"],
)
@pytest.mark.parametrize(
    "wrap",
    [lambda value: value, Holder, lambda value: (0.5, value), _pair, _partial, _of_a_tensor],
    ids=["tensor", "object", "tuple", "named tuple", "partial", "attribute of a tensor"],
)
def test_a_plain_tensor_when_the_user_writes_to_it_is_followed(wrap, write) -> None:
    """The copies kept the value of before, silently, where its version does not tell of it."""
    value = torch.ones(4)
    net = Hides(wrap(value))
    plain = Hides(wrap(value.clone()))
    plain.load_state_dict(net.state_dict())
    two = Replicas(net, groups(), chunks=2)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(3):
        loss = two.forward_backward(x, target=y, loss_fn=F.mse_loss).loss
        expected = F.mse_loss(plain(x), y)
        assert_close(loss, expected.detach())
        for (part,) in (net.parts, plain.parts):
            write(_value_of(part))


def test_a_plain_tensor_when_the_forward_writes_to_it_is_each_copys_own() -> None:
    """A state is not overwritten by the model's."""

    class Sums(Hides):
        def forward(self, x):
            (part,) = self.parts
            part.add_(1.0)
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h)

    two = Replicas(Sums(torch.zeros(4)), groups(), chunks=2)
    for _ in range(2):
        two.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=F.mse_loss)
    assert [pipe.module.parts[0][0].item() for pipe in two.pipes] == [4.0, 4.0]


def test_attributes_of_parameters_are_in_the_copies_and_followed() -> None:
    """Attack 22: ``copy.deepcopy`` of a parameter leaves them out."""

    class Gained(Hides):
        def forward(self, x):
            with bp.Block(stage=0):
                h = self.a(x) * self.a.weight.gain
            with bp.Block(stage=1):
                return self.b(h)

    net = Gained(None)
    net.a.weight.gain = 2.0
    two = Replicas(net, groups(), chunks=2)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for gain in (2.0, 3.0, 3.0):
        net.a.weight.gain = gain
        loss = two.forward_backward(x, target=y, loss_fn=F.mse_loss).loss
        assert_close(loss, F.mse_loss(net(x), y).detach())
