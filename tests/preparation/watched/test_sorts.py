"""Losses that begin, between steps, to read what the forward sets."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.preparation.watched.sorts import sort_of

from ...stage_devices import stages


class Measures(nn.Module):
    """Leaves a number of its first stage for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mean = nn.Linear(4, 4), nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.mean = h.detach().mean().item()
        with bp.Block(stage=1):
            return self.b(h)


class Reads(nn.Module):
    """A term of a loss that reads the number."""

    def __init__(self, net: Measures) -> None:
        super().__init__()
        self.nets = [net]

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return mse_loss(out, y) * self.nets[0].mean


class Terms(nn.Module):
    """A loss with terms in a container."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.terms = container

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        terms = self.terms if isinstance(self.terms, list) else self.terms.values()
        return sum(term(out, y) for term in terms)


class Chooses:
    """A loss that calls one of its methods."""

    def __init__(self) -> None:
        self.net: Measures | None = None
        self.name, self.number, self.chosen = "plain", 0, self.plain

    def plain(self, out: Tensor, y: Tensor) -> Tensor:
        return mse_loss(out, y)

    def scaled(self, out: Tensor, y: Tensor) -> Tensor:
        assert self.net is not None
        return mse_loss(out, y) * self.net.mean


class ByName(Chooses):
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return getattr(self, self.name)(out, y)


class ByNumber(Chooses):
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return [self.plain, self.scaled][self.number](out, y)


class ByTable(Chooses):
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return {"plain": self.plain, "scaled": self.scaled}[self.name](out, y)


class ByAttribute(Chooses):
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.chosen(out, y)


class Warms(Chooses):
    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.plain(out, y) if self.net is None else self.scaled(out, y)


def _adds(loss: Terms, net: Measures) -> None:
    if isinstance(loss.terms, list):
        loss.terms.append(Reads(net))
    else:
        loss.terms["reads"] = Reads(net)


def _turns(loss: Chooses, net: Measures) -> None:
    loss.net, loss.name, loss.number, loss.chosen = net, "scaled", 1, loss.scaled


def _replaces(loss: Terms, net: Measures) -> None:
    loss.forward = lambda out, y: mse_loss(out, y) * net.mean


LOSSES: dict[str, tuple[Callable[[], Any], Callable[[Any, Measures], None]]] = {
    "list": (lambda: Terms([nn.MSELoss()]), _adds),
    "dict": (lambda: Terms({"mse": nn.MSELoss()}), _adds),
    "module dict": (lambda: Terms(nn.ModuleDict({"mse": nn.MSELoss()})), _adds),
    "forward": (lambda: Terms([nn.MSELoss()]), _replaces),
    **{kind.__name__: (kind, _turns) for kind in (ByName, ByNumber, ByTable, ByAttribute, Warms)},
}


@pytest.mark.parametrize("begins", [0, 1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_comes_to_read_what_a_stage_sets_is_refused(kind: str, begins: int):
    """Attack 25: it was looked at once, when the model was recorded."""
    make, change = LOSSES[kind]
    net, loss = Measures(), make()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(begins):
        pipe.forward_backward(x, target=y, loss_fn=loss)
    change(loss, net)
    with pytest.raises(StateError, match="changes attribute 'mean' of the model"):
        pipe.forward_backward(x, target=y, loss_fn=loss)


class Counts:
    """Has other numbers, tensors and a longer list in each step."""

    def __init__(self) -> None:
        self.step, self.weight, self.losses = 0, torch.ones(1), list[float]()

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        self.losses.append(float(self.step))
        return mse_loss(out, y) * self.weight / len(self.losses)


def test_numbers_and_histories_are_of_one_sort():
    """A model is not recorded once more in each step."""
    loss = Counts()
    loss(torch.ones(1), torch.ones(1))
    before = sort_of(loss)
    loss(torch.ones(1), torch.ones(1))
    loss.weight = torch.zeros(1)
    assert sort_of(loss) == before


def test_a_loss_with_something_else_in_each_step_is_recorded_seldom():
    """A text that says the step is no switch."""
    net, loss = Measures(), ByAttribute()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, schedule="sequential")
    _turns(loss, net)
    seen = set[int]()
    for step in range(40):
        loss.chosen = lambda out, y, name=f"step {step}": loss.scaled(out, y)
        pipe.forward_backward(torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=loss)
        seen.add(id(pipe.recording))
    assert len(seen) <= 20


class Around:
    """Scales a gradient, or what is saved, by the number, from when it is given the model."""

    net: Measures | None = None

    def __call__(self, value: Tensor) -> Tensor:
        return value if self.net is None else value * self.net.mean


class Functions(Around, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return self(result) if func is torch.nn.functional.linear else result


class Operations(Around, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return self(result) if func is torch.ops.aten.addmm.default else result


def _on_parameter(net: Measures, around: Around) -> Any:
    net.a.weight.register_hook(around)
    return nullcontext()


def _closed_over(net: Measures, around: Around) -> Any:
    net.a.weight.register_hook(lambda gradient: around(gradient))
    return nullcontext()


def _around_saved(net: Measures, around: Around) -> Any:
    return saved_tensors_hooks(lambda saved: saved, around.__call__)


PLACES: dict[str, tuple[type[Around], Callable[[Measures, Any], Any]]] = {
    "parameter": (Around, _on_parameter),
    "closure": (Around, _closed_over),
    "saved": (Around, _around_saved),
    "function mode": (Functions, lambda net, around: around),
    "dispatch mode": (Operations, lambda net, around: around),
}


@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_around_a_step_may_begin_to_read(place: str, begins: int):
    """Attack 25: hooks on parameters, and modes, were looked at once as well."""
    kind, enter = PLACES[place]
    net, around = Measures(), kind()
    context, x = enter(net, around), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)

    def steps() -> None:
        for step in range(3):
            if step == begins:
                around.net = net
            with context:
                pipe.forward_backward(x, loss_fn=torch.sum)

    with pytest.raises(StateError, match="changes attribute 'mean' of the model"):
        steps()


def test_a_hook_that_leads_to_the_model_again_has_an_end() -> None:
    net = nn.Sequential(nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), stage=1))
    seen: dict[str, Tensor] = {}
    net[0].register_forward_hook(lambda *given: seen.__setitem__(str(len(net)), given[2]))
    trainer = type("Trainer", (), {"net": net})()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * len(trainer.net)

    assert sort_of(loss) == sort_of(loss)
    net[0].register_forward_hook(lambda *given: None)
    x = torch.ones(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    assert pipe.forward_backward(x, target=x, loss_fn=loss).loss.isfinite()
