"""Losses and code that autograd calls reach the model by what a call gives: only their source is
looked at."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages

Loss = Callable[..., Tensor]


class Counts(nn.Module):
    """The first stage counts; what the second one hooks on its result is up to a test."""

    def __init__(self, hook: Callable[["Counts", Tensor], Tensor | None] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.n, self.log, self.hook = 0, [1.0], hook
        self.schedule, self.layer = Schedule(), nn.Threshold(0.1, 1.0)
        Registry.found = Single().model = Other().model = self

    def __getitem__(self, key: int) -> list[float]:
        return self.log

    def kept(self, key: str = "n") -> int:
        found: int = getattr(self, key)
        return found

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            self.n += 1
            self.log.append(1.0)
            self.schedule.value = self.n
            self.layer.value = float(self.n)
            COUNT()
        with bp.Block(stage=1):
            out: Tensor = self.b(h)
            changed = None if self.hook is None else self.hook(self, out)
            return out if changed is None else changed


class Registry:
    """The one model, for everybody."""

    found: ClassVar[Any] = None

    @classmethod
    def one(cls) -> Any:
        return cls.found


class Single:
    """There is one of it."""

    found: ClassVar[Any] = None
    model: Counts

    def __new__(cls) -> "Single":
        if cls.found is None:
            cls.found = super().__new__(cls)
        one: Single = cls.found
        return one


class OneOfEach(type):
    """The class of classes that have one object."""

    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls.made:
            cls.made[cls] = super().__call__(*args, **kwargs)
        return cls.made[cls]


class Other(metaclass=OneOfEach):
    """Such a class."""

    model: Counts


class Reader:
    """It is made where it reads."""

    def __init__(self, model: Counts, factor: float = 1.0) -> None:
        self.factor, self.model = factor, model

    def value(self) -> float:
        return self.model.n * self.factor


class Named(NamedTuple):
    """The same as a tuple."""

    model: Counts

    def value(self) -> int:
        return self.model.n


class Entries:
    """An object that a subscript reads."""

    def __init__(self, log: list[float]) -> None:
        self.log = log

    def __getitem__(self, key: int) -> float:
        return self.log[key]


@dataclasses.dataclass
class Holder:
    """The same, with the ``__init__`` that nobody wrote."""

    model: Counts

    def value(self) -> int:
        return self.model.n


class Schedule:
    """A value that a call may set."""

    def __init__(self) -> None:
        self.value = 1

    def __call__(self, value: int | None = None) -> int:
        if value is not None:
            self.value = value
        return self.value

    def __next__(self) -> int:
        return self.value


def _counter() -> tuple[Callable[[], None], Callable[[], int]]:
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    def counted() -> int:
        return n

    return count, counted


COUNT, COUNTED = _counter()


def _n(model: Counts) -> int:
    return model.n


def _only_by_name(*, model: Counts) -> int:
    return model.n


def _of_all(**models: Counts) -> int:
    return models["model"].n


def _hands_on(model: Counts) -> int:
    return _n(model=model)


def _last(output: Tensor, target: Tensor, model: Counts) -> Tensor:
    return mse_loss(output, target) * model.n


def _first(model: Counts, output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target) * model.n


def _log_by_name(output: Tensor, target: Tensor, log: list[float]) -> Tensor:
    return mse_loss(output, target) * len(log)


def _decorated(function: Loss, net: Counts) -> Loss:
    def inner(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, model=net, **kwargs)

    return inner


def _adds(log: list[float]) -> float:
    log.append(1.0)
    return 1.0


def _times(factor: Callable[[Any], float]) -> Callable[[Any], Loss]:
    return lambda net: lambda output, target: mse_loss(output, target) * factor(net)


LOSSES: list[Callable[[Counts], Loss]] = [
    lambda net: partial(_last, model=net),
    lambda net: partial(_first, net),
    lambda net: partial(_log_by_name, log=net.log),
    lambda net: lambda o, t: _last(o, t, model=net),
    lambda net: lambda o, t: _last(o, t, model=net),
    lambda net: lambda *given: _last(*given, net),
    lambda net: _decorated(_last, net),
    lambda net: lambda o, t: mse_loss(o, t) * _only_by_name(model=net),
    lambda net: lambda o, t: mse_loss(o, t) * _of_all(model=net),
    lambda net: lambda o, t: mse_loss(o, t) * _hands_on(net),
    lambda net: lambda o, t: mse_loss(o, t) * next(iter(map(_n, [net]))),
    lambda net: lambda o, t: mse_loss(o, t) * partial(_n, model=net)(),
    lambda net: lambda o, t: mse_loss(o, t) * Reader(net).value(),
    lambda net: lambda o, t: mse_loss(o, t) * Reader(model=net).value(),
    lambda net: lambda o, t: mse_loss(o, t) * Holder(net).value(),
    lambda net: lambda o, t: mse_loss(o, t) * Named(net).value(),
    lambda net: lambda o, t: mse_loss(o, t) * Entries(net.log)[-1],
    lambda net: lambda o, t: mse_loss(o, t) * Registry.one().n,
    lambda net: lambda o, t: mse_loss(o, t) * Single().model.n,
    lambda net: lambda o, t: mse_loss(o, t) * Other().model.n,
    lambda net: lambda o, t: mse_loss(o, t) * net.kept(),
    lambda net: lambda o, t: mse_loss(o, t) * net.kept(key="n"),
    lambda net: lambda o, t: mse_loss(o, t) * len(net[0]),
    lambda net: lambda o, t: mse_loss(o, t) * net.schedule(),
    lambda net: lambda o, t: mse_loss(o, t) * next(net.schedule),  # type: ignore[call-overload]
    lambda net: lambda o, t: mse_loss(o, t) * COUNTED(),
    lambda net: lambda o, t: mse_loss(o, t) * net.layer(torch.zeros(1, device=o.device)),
    lambda net: lambda o, t: mse_loss(o, t) * _adds(log=net.log) * len(net.log),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_reads_what_a_call_gives_it(loss: Callable[[Counts], Loss]) -> None:
    """An argument by keyword, or what a call returns, was followed by nobody: other losses."""
    net = Counts()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    names = "attribute 'n' of the model|a list|of a Schedule|of a closure|layer.value"
    with pytest.raises(StateError, match=names):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=loss(net))


def _scaled(gradient: Tensor, model: Counts) -> Tensor:
    return gradient * model.n


class Scaled(torch.autograd.Function):
    """Its backward hands the model on by keyword."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, model: Counts) -> Tensor:  # type: ignore[override]
        ctx.model = model
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _scaled(gradient, model=ctx.model), None


HOOKS: list[Callable[[Counts, Tensor], Tensor | None]] = [
    lambda net, h: h.register_hook(partial(_scaled, model=net)) and None,
    lambda net, h: h.register_hook(lambda g: _scaled(g, model=net)) and None,
    lambda net, h: h.register_hook(lambda g: g * Reader(net).value()) and None,
    lambda net, h: Scaled.apply(h, net),
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_backward_reads_what_a_call_gives_it(
    hook: Callable[[Counts, Tensor], Tensor | None],
) -> None:
    """The same in hooks and backwards: other gradients."""
    pipe = bp.Pipeline(Counts(hook), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="attribute 'n' of the model"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


class Apart:
    """It has an attribute of the same name."""

    n = 3


APART: list[Callable[[Any], float]] = [
    lambda apart: Reader(apart).value(),
    lambda apart: _hands_on(apart),
    lambda apart: _only_by_name(model=apart),
    lambda apart: partial(_n, model=apart)(),
]


@pytest.mark.parametrize("factor", APART)
def test_a_loss_that_reads_another_object_is_not_refused(factor: Callable[[Any], float]) -> None:
    """What is read is the attribute of the object that a call gives."""
    with bp.Pipeline(Counts(), devices=stages(2), chunks=4) as pipe:
        x, y, loss = torch.randn(8, 4), torch.randn(8, 4), _times(factor)(Apart())
        assert torch.isfinite(pipe.forward_backward(x, target=y, loss_fn=loss).loss)
