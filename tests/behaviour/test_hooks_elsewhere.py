"""Hooks of modules without an operation, of leaves that no module has, and of what a loss uses."""

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


class Counts(nn.Module):
    """The first stage counts; ``tap`` and ``leaf`` are on the second one."""

    def __init__(self, tap: nn.Module | None = None, *, counts: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.tap = nn.Linear(4, 4), nn.Linear(4, 4), tap or nn.Tanh()
        self.n, self.counts = 1, counts
        self.held: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = torch.sigmoid(self.a(x))
            if self.counts:
                self.n = self.n % 7 + 1
        with bp.Block(stage=1):
            out: Tensor = self.tap(self.b(h))
            for leaf in self.held.values():
                out = out * leaf
            return out


def _step(net: nn.Module, loss: Callable[..., Tensor] = mse_loss) -> Tensor:
    with bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe") as pipe:
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found: Tensor = pipe.forward_backward(x, target=y, loss_fn=loss).loss
        return found


TAPS: list[Callable[[], nn.Module]] = [nn.Identity, nn.Sequential, lambda: nn.Dropout(0.0)]


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("tap", TAPS)
def test_a_backward_hook_of_a_module_without_an_operation_is_looked_at(
    tap: Callable[[], nn.Module], is_before: bool
) -> None:
    """Nobody knew in which backward it is called: other gradients, without a word."""
    net = Counts(tap())
    if is_before:
        net.tap.register_full_backward_pre_hook(lambda m, go: (go[0] * net.n,))
    else:
        net.tap.register_full_backward_hook(lambda m, gi, go: (gi[0] * net.n,))
    with pytest.raises(StateError, match="attribute 'n' of the model.*in a backward"):
        _step(net)


@pytest.mark.parametrize("tap", TAPS)
def test_a_backward_hook_without_state_runs_there(tap: Callable[[], nn.Module]) -> None:
    """It is no reason to refuse the module."""
    net = Counts(tap(), counts=False)
    net.tap.register_full_backward_hook(lambda m, gi, go: (gi[0] * net.n,))
    plain = Counts(tap(), counts=False)
    plain.load_state_dict(net.state_dict())
    plain.tap.register_full_backward_hook(lambda m, gi, go: (gi[0] * plain.n,))
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with bp.Pipeline(net, devices=stages(2), chunks=4) as pipe:
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


def _makes_one(net: Counts) -> nn.Module:
    made = nn.Flatten()
    made.register_full_backward_hook(lambda m, gi, go: (gi[0] * net.n,))
    return made


@pytest.mark.parametrize("how", ["in a list", "made in the forward"])
def test_a_backward_hook_of_a_module_that_is_not_registered_is_looked_at(how: str) -> None:
    """As people keep a teacher out of the state dict."""

    class Taps(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            out: Tensor = (kept[0] if kept else _makes_one(net))(h)
            return out

    kept: list[nn.Module] = []
    net = Counts(Taps())
    if how == "in a list":
        kept.append(_makes_one(net))
    with pytest.raises(StateError, match="attribute 'n' of the model.*in a backward"):
        _step(net)


@pytest.mark.parametrize("how", ["parameter", "leaf", "buffer"])
def test_a_hook_of_a_leaf_that_is_no_parameter_is_looked_at(how: str) -> None:
    """Hooks were found on registered parameters only."""
    net = Counts()
    leaf = torch.ones(4, requires_grad=True, device=stages(2)[1])
    if how == "parameter":
        leaf = nn.Parameter(leaf.detach())
    if how == "buffer":
        net.register_buffer("leaf", leaf)
    net.held["leaf"] = leaf
    leaf.register_hook(lambda gradient: gradient * net.n)
    with pytest.raises(StateError, match="attribute 'n' of the model.*in a backward"):
        _step(net)


class Doubled(torch.autograd.Function):
    """Its backward reads the model that its context has."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, model: Counts) -> Tensor:  # type: ignore[override]
        ctx.model = model
        return output * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.model.n, None


class SetUp(torch.autograd.Function):
    """The same, with a context that is set up apart."""

    @staticmethod
    def forward(output: Tensor, model: Counts) -> Tensor:  # type: ignore[override]
        return output * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.model = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.model.n, None


class Weighted(nn.Module):
    """A loss with a layer and a weight that have hooks."""

    def __init__(self, net: Counts, *, of_weight: bool) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        if of_weight:
            self.weight.register_hook(lambda gradient: gradient * net.n)
        else:
            self.layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * net.n,))
        self.to(stages(2)[1])

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(self.layer(output) * self.weight, target)


LOSSES: list[Callable[[Counts], Callable[..., Tensor]]] = [
    lambda net: Weighted(net, of_weight=True),
    lambda net: Weighted(net, of_weight=False),
    lambda net: lambda output, target: mse_loss(Doubled.apply(output, net), target),
    lambda net: lambda output, target: mse_loss(SetUp.apply(output, net), target),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_hands_to_autograd_is_looked_at(
    loss: Callable[[Counts], Callable[..., Tensor]],
) -> None:
    """Only the loss itself was."""
    net = Counts()
    with pytest.raises(StateError, match="attribute 'n' of the model"):
        _step(net, loss(net))


class Stored:
    """An attribute whose assignment is code of the user's."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return owner.n

    def __set__(self, owner: Any, value: int) -> None:
        owner.n = value


class Sets(nn.Module):
    """A hook of the second stage sets, by a descriptor, what the first one reads."""

    stored = Stored()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 1

    def count(self, gradient: Tensor) -> Tensor:
        self.stored = 2
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.n
        with bp.Block(stage=1):
            out: Tensor = self.b(h)
            out.register_hook(self.count)
            return out


def test_a_hook_that_sets_by_a_descriptor_is_looked_at() -> None:
    """Attack 31: setters of properties were."""
    with pytest.raises(StateError, match="attribute 'n' of the model"):
        _step(Sets())


class _Normed:
    """A hook that is an object, with a running norm of its own."""

    def __init__(self) -> None:
        self.norm = 0.1

    def __call__(self, gradient: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * gradient.norm().item()
        return gradient / self.norm


class _HookedByObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.normed = nn.Linear(4, 4), nn.Linear(4, 4), _Normed()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            h.register_hook(self.normed)
        with bp.Block(stage=1):
            return self.b(h)


def test_a_hook_that_is_an_object_is_not_read_when_it_is_registered() -> None:
    """The object was taken for an argument that torch reads in the forward."""
    net, plain = _HookedByObject(), _HookedByObject()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
    x = torch.randn(8, 4)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_same_gradients(net, plain)
    assert net.normed.norm == pytest.approx(plain.normed.norm)


class _Rescales:
    """A loss that registers a hook on what it is given; ``way`` says which."""

    def __init__(self, way: str) -> None:
        self.norm, self.way = 1.0, way

    def rescale(self, gradient: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * gradient.norm().item()
        return gradient / self.norm

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        def rescaled(gradient: Tensor) -> Tensor:
            return self.rescale(gradient)

        if self.way == "method":
            output.register_hook(self.rescale)
        elif self.way == "lambda":
            output.register_hook(lambda gradient: self.rescale(gradient))
        else:
            output.register_hook(rescaled)
        return mse_loss(output, target)


class _ReadsNorm(_Rescales):
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return super().__call__(output, target) * self.norm


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("way", ["method", "lambda", "function"])
def test_a_hook_that_the_loss_registers_may_count_in_what_no_other_code_reads(
    way: str, schedule: str
) -> None:
    net, loss, plain_loss = _HookedByObject(), _Rescales(way), _Rescales(way)
    plain = _HookedByObject()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule=schedule)
    x = torch.randn(8, 4)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=loss)
        plain_step(plain, (x,), {}, x, plain_loss, 4)
        assert_same_gradients(net, plain)
    assert loss.norm == pytest.approx(plain_loss.norm)
    pipe = bp.Pipeline(_HookedByObject(), devices=["cpu"] * 2, chunks=4, schedule=schedule)
    with pytest.raises(StateError, match="in a backward"):
        pipe.forward_backward(x, target=x, loss_fn=_ReadsNorm(way))
