"""Random numbers that are drawn in a backward, where no micro-batch has a stream of its own."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import dropout, mse_loss

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.recording.plain_values.drawn_numbers import DrawnNumbers
from blockpipe.recording.plain_values.still_code import frames_of
from blockpipe.recording.plain_values.values import back

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

X = torch.randn(8, 4)
ONE, OTHER = torch.Generator(), torch.Generator()


class Draws(Function):
    """Its backward calls a function with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.draw = draw
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.draw(gradient), None


class Net(nn.Module):
    """Two layers on two stages, of which a backward may draw numbers."""

    def __init__(self, **draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.draws = nn.Linear(4, 4), nn.Linear(4, 4), draws

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.draw("a", self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(self.draw("b", h))

    def draw(self, name: str, h: Tensor) -> Tensor:
        if name in self.draws:
            h = Draws.apply(h, self.draws[name])
        return h * self.draws["forward"](h) if name == "a" and "forward" in self.draws else h


def _like(gradient: Tensor) -> Tensor:
    return gradient * torch.rand_like(gradient)


def _in_place(gradient: Tensor) -> Tensor:
    return gradient + torch.empty_like(gradient).normal_()


def _dropout(gradient: Tensor) -> Tensor:
    return dropout(gradient, 0.5)


def _python(gradient: Tensor) -> Tensor:
    return gradient * random.random()


def _numpy(gradient: Tensor) -> Tensor:
    return gradient * float(np.random.rand())


def _from_one(gradient: Tensor) -> Tensor:
    return gradient * torch.rand(1, generator=ONE).item()


def _from_other(gradient: Tensor) -> Tensor:
    return gradient * torch.rand(1, generator=OTHER).item()


def _step(net: Net, **options: Any) -> None:
    ONE.manual_seed(1)
    OTHER.manual_seed(2)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.every
@pytest.mark.parametrize(
    ("draws", "what"),
    [
        ({"a": _like}, r"torch's random generator in a backward on hops \[0\]"),
        ({"b": _in_place}, r"torch's random generator in a backward on hops \[1\]"),
        ({"b": _dropout}, r"torch's random generator in a backward on hops \[1\]"),
        ({"a": _python}, r"Python's random generator in a backward on hops \[0\]"),
        ({"a": _numpy}, r"numpy's random generator in a backward on hops \[0\]"),
        ({"a": _from_one, "b": _from_one}, r"a torch\.Generator in a backward on hops \[0, 1\]"),
        ({"a": _from_one, "forward": _from_one}, r"a torch\.Generator .*on hops \[0\]"),
    ],
)
def test_a_backward_that_draws_from_a_generator_of_others_is_refused(
    draws: dict[str, Callable[[Tensor], Tensor]], what: str
) -> None:
    """Which numbers it got depended on timing."""
    with pytest.raises(StateError, match=rf"{what}.*drawn_numbers\.py:\d+.*a generator of its own"):
        _step(Net(**draws))


@pytest.mark.every
@pytest.mark.parametrize(
    "draws",
    [
        {"a": _from_one},
        {"a": _from_one, "b": _from_other},
        {"b": _from_one, "forward": _from_other},
    ],
)
def test_a_backward_that_draws_from_a_generator_of_its_own_runs_as_in_the_plain_loop(
    draws: dict[str, Callable[[Tensor], Tensor]],
) -> None:
    net = Net(**draws)
    plain = copy.deepcopy(net)
    _step(net)
    ONE.manual_seed(1)
    OTHER.manual_seed(2)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def test_a_hook_that_draws_is_refused() -> None:
    net = Net()
    net.a.weight.register_hook(_like)
    with pytest.raises(StateError, match="torch's random generator in a backward on hops"):
        _step(net)


def test_a_backward_that_draws_runs_where_micro_batches_come_one_by_one() -> None:
    """The numbers follow from the seed."""
    gradients = []
    for _ in range(2):
        net = Net(a=_like)
        nn.init.ones_(net.a.weight)
        nn.init.ones_(net.b.weight)
        nn.init.zeros_(net.a.bias)
        nn.init.zeros_(net.b.bias)
        torch.manual_seed(3)
        _step(net, schedule="sequential")
        gradients.append(net.a.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Reversible(nn.Module):
    """Two layers on two stages, of which the first one's backward runs a module, as that of a
    reversible block does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.module = nn.Linear(4, 4), nn.Linear(4, 4), module

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = Draws.apply(self.a(x), self.module)
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Sequential(nn.Tanh(), nn.Dropout1d(0.5)),
        nn.TransformerEncoderLayer(4, 1, 4),
        nn.RReLU(),
    ],
)
def test_a_backward_that_runs_a_module_which_drops_is_refused(module: nn.Module) -> None:
    """A step that overlaps gave it other numbers, and the step only warned of the draws."""
    with pytest.raises(StateError, match=r"torch's random generator in a backward on hops \[0\]"):
        _step(Reversible(module))


@pytest.mark.parametrize(
    "module", [nn.Dropout(0), nn.Dropout().eval(), nn.Sequential(nn.Tanh(), nn.Softsign())]
)
def test_a_backward_that_runs_a_module_which_does_not_drop_runs(module: nn.Module) -> None:
    net = Reversible(module)
    plain = copy.deepcopy(net)
    _step(net)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def _sampled(gradient: Tensor) -> Tensor:
    return gradient * torch.distributions.Normal(0.0, 1.0).rsample(gradient.shape)


NOISE = torch.distributions.Normal(0.0, 1.0)


def _sampled_from_global(gradient: Tensor) -> Tensor:
    return gradient * NOISE.sample(gradient.shape)


def _initialized(gradient: Tensor) -> Tensor:
    return gradient * nn.init.normal_(torch.empty_like(gradient))


@pytest.mark.parametrize("draw", [_sampled, _sampled_from_global, _initialized])
def test_a_backward_that_samples_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(StateError, match=r"torch's random generator in a backward on hops \[0\]"):
        _step(Net(a=draw))


def _restores(gradient: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.set_rng_state(torch.get_rng_state())
        return dropout(gradient, 0.5)


@pytest.mark.parametrize("one_each", [False, True])
def test_a_backward_that_sets_the_generators_state_is_fine_where_stages_have_one_each(
    one_each: bool,
) -> None:
    """So do functions that run a forward again. On the CPU other stages would draw meanwhile."""
    draws = DrawnNumbers([])
    draws.note(frames_of(_restores), back(0))
    assert len([*draws.shared({}, one_each=one_each)]) == (0 if one_each else 1)
