"""Values that one stage sets and that other code reads in a roundabout way."""

import copy
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import plain_step
from ..stage_devices import stages

X = torch.arange(32.0).view(8, 4) / 32


class State:
    """One object for all, whose number is first on the class."""

    _only: "State | None" = None
    calls = 0

    def __new__(cls) -> "State":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only


class Named:
    """One object for each name."""

    _all: dict[str, "Named"] = {}  # noqa: RUF012 - as people write it
    calls = 0

    def __new__(cls, name: str) -> "Named":
        if name not in cls._all:
            cls._all[name] = super().__new__(cls)
        return cls._all[name]


class Scale:
    """Its method's results are kept until the number changes."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1
        Scale.now.cache_clear()

    @functools.lru_cache  # noqa: B019 - as people write it
    def now(self) -> float:
        return 1.0 + 0.1 * self.calls


class Parts(nn.Module):
    """The first stage sets what the second one, the loss or a hook reads."""

    def __init__(self, sets: Callable[[Any], None], reads: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sets, self.reads, self.scale = sets, reads, Scale()
        self.norms: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self.register_buffer("total", torch.zeros(()))


class InForward(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.sets(self)
        with bp.Block(stage=1):
            return self.b(h) * self.reads(self)


class InLoss(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.sets(self)
        with bp.Block(stage=1):
            return self.b(h)


class InHook(Parts):
    """A hook of the second stage sets it, and the first one reads it."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * (1.0 + self.reads(self))
        with bp.Block(stage=1):
            h = self.b(h)
            if h.requires_grad:
                h.register_hook(lambda gradient: self.sets(self))
            return h


def _count_state(net: Parts) -> None:
    State().calls += 1


def _count_named(net: Parts) -> None:
    Named("x").calls += 1


def _count_scale(net: Parts) -> None:
    net.scale.count()


def _keep_norm(net: Parts) -> None:
    net.norms[net.b] = net.norms.get(net.b, 0.0) + 1.0


def _add_by_name(net: Parts) -> None:
    getattr(net, "total").add_(1.0)  # noqa: B009 - as names of buffers are computed


def _sets_on_logger(net: Parts) -> None:
    logging.getLogger("parts").rate = _of_logger(net) + 0.5  # type: ignore[attr-defined]


def _sets_on_local(net: Parts) -> None:
    log = logging.getLogger("parts")
    log.rate = _of_local(net) + 0.5  # type: ignore[attr-defined]


def _of_logger(net: Parts) -> float:
    return getattr(logging.getLogger("parts"), "rate", 1.0)


def _of_local(net: Parts) -> float:
    log = logging.getLogger("parts")
    return log.rate if hasattr(log, "rate") else 1.0  # type: ignore[attr-defined]


def _evaluated(net: Parts) -> float:
    return 1.0 + eval("net.scale.calls")


def _evaluated_with(net: Parts) -> float:
    return 1.0 + eval(f"part.{'scale'}.calls", {"part": net})


def _count_plainly(net: Parts) -> None:
    net.scale.calls += 1


WAYS: list[tuple[type[Parts], Callable[[Any], None], Callable[[Any], float]]] = [
    (InForward, _count_state, lambda net: 1.0 + 0.1 * State().calls),
    (InForward, _count_named, lambda net: 1.0 + 0.1 * Named("x").calls),
    (InLoss, _count_state, lambda net: 1.0 + 0.1 * State().calls),
    (InLoss, _count_scale, lambda net: net.scale.now()),
    (InHook, _keep_norm, lambda net: net.norms.get(net.b, 0.0)),
    (InHook, _count_state, lambda net: 0.1 * State().calls),
    (InHook, _add_by_name, lambda net: net.total.item()),
    (InForward, _sets_on_logger, _of_logger),
    (InForward, _sets_on_local, _of_local),
    (InForward, _count_plainly, _evaluated),
    (InForward, _count_plainly, _evaluated_with),
    (InLoss, _count_plainly, _evaluated),
]


@pytest.fixture(autouse=True)
def _no_rate() -> None:
    vars(logging.getLogger("parts")).pop("rate", None)


@pytest.mark.parametrize(("kind", "sets", "reads"), WAYS)
def test_a_value_that_is_named_in_a_roundabout_way_is_refused(
    kind: type[Parts], sets: Callable[[Any], None], reads: Callable[[Any], float]
) -> None:
    net = kind(sets, reads)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * (net.reads(net) if isinstance(net, InLoss) else 1.0)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once|comes later|later micro-batch"):
        pipe.forward_backward(X, target=X, loss_fn=loss)


class Classes(nn.Module):
    """Reads a class's own number, of which each object is another one."""

    class Options:
        scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.Options().scale
        with bp.Block(stage=1):
            return self.b(h) * self.Options().scale


def test_what_a_class_gives_each_object_may_be_read_everywhere() -> None:
    pipe = bp.Pipeline(Classes(), devices=stages(2), chunks=4)
    assert pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss.isfinite()


def test_the_length_of_a_list_that_a_librarys_module_fills_is_compared() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.all = nn.Linear(4, 4), nn.Linear(4, 4), torchmetrics.CatMetric()

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                self.all.update(h.detach().mean())
            with bp.Block(stage=1):
                return self.b(h) * len(self.all.value)

    pipe = bp.Pipeline(Measured(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="a list of 1 for micro-batch 0 and as a list of 2"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def test_a_module_that_calls_its_forward_through_super_is_not_changed() -> None:
    """What a recording puts in the place of each forward was taken for a change by the user, if
    something reads the forward itself."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError())

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                y = self.b(h)
                self.range(y.detach(), y.detach() * 0)
                return y

    net = Measured()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=["cpu", "cpu"], chunks=4)
    for _ in range(3):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert net.range.compute() == plain.range.compute()


class Balanced(nn.Module):
    """Leaves a term for the loss, and chooses by its data: it is recorded for real."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.term = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.term = h.square().mean()
        return h * 2 if bool((h.detach().sum() < 1e6).any()) else h


def test_a_tensor_for_the_loss_is_no_change_of_the_modules() -> None:
    net = nn.Sequential(Balanced(), bp.BeginBlock(Balanced(), stage=1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.1)  # meanwhile the first stage goes on
        terms = [m.term for m in net.modules() if isinstance(m, Balanced)]
        return mse_loss(output, target) + sum(term for term in terms if term is not None)

    def two_steps() -> None:
        for _ in range(2):
            pipe.forward_backward(X, target=X, loss_fn=loss)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="belongs to micro-batch"):
        two_steps()  # in the first one, forwards that may draw take turns: it mostly succeeds
    pipe.schedule = "sequential"
    assert pipe.forward_backward(X, target=X, loss_fn=loss).loss.isfinite()


class Counting(Parts):
    """Counts on a logger, on one stage."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            logging.getLogger("parts").rate += 1  # type: ignore[attr-defined]
        with bp.Block(stage=1):
            return self.b(h)


def test_a_recording_leaves_no_count_on_a_logger() -> None:
    log: Any = logging.getLogger("parts")
    log.rate = 0
    pipe = bp.Pipeline(Counting(_count_plainly, _of_logger), devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert log.rate == 4
