"""Attributes that a later step sets, or reads, on another stage than the recorded forward."""

import copy
import functools
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.execution.microbatch import attribute_uses

from ...parity import assert_same_gradients, assert_trains_as_plain, plain_step
from ...stage_devices import assert_close, stages

# It has no source, so that no recording sees what it may do.
HIDDEN = compile("net.late(net) if net.is_late() else None", "<hidden>", "eval")
LATE = 10  # micro-batches: from the middle of the third step on
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 32).view(8, 4)


class Mean:
    """A running mean, as an object of its own."""

    def __init__(self) -> None:
        self.value = 0.0

    def update(self, value: float) -> None:
        self.value = 0.9 * self.value + 0.1 * value

    def reset(self) -> None:
        self.value = 1.0


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value = 0.0

    update, reset = Mean.update, Mean.reset


class Scaled(nn.Linear):
    """A layer with a running mean, which it sets and reads in each forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mean, self.gate = 0.0, 0.0

    def reset(self) -> None:
        self.mean = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean().item()
        return super().forward(x) * (1 + self.mean + self.gate)


class Net(nn.Module):
    """From a certain micro-batch on, the first stage changes what is the last one's."""

    def __init__(self, late: Callable[["Net"], object], mean: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(4, 4), Scaled(), Scaled()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.0)
        self.held, self.other, self.calls, self.late = mean or Mean(), Mean(), 0, late
        self.layers = [self.b]

    def is_late(self) -> bool:
        return self.calls >= LATE

    def name(self) -> str:
        return "mean"

    def pick(self) -> Any:
        return self.held if self.is_late() else self.other

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            eval(HIDDEN, {"net": self})
            h = self.a(x)
        with bp.Block(stage=1):
            h = self.drop(self.norm(self.b(h)))
            self.held.update(h.detach().abs().mean().item())
            return h * (1 + self.held.value)


def _reset(module: Any) -> None:
    if hasattr(module, "reset"):
        module.reset()


def _freeze(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm1d):
        module.eval()


def _keep(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.5


class Made:
    def __init__(self, layer: Scaled) -> None:
        layer.mean = 1.0


@dataclass
class MadeData:
    layer: Any

    def __post_init__(self) -> None:
        self.layer.mean = 1.0


SETS: dict[str, Callable[[Net], object]] = {
    "apply": lambda net: net.apply(_reset),
    "a constructor": lambda net: Made(net.b),
    "a dataclass": lambda net: MadeData(net.b),
    "setattr": lambda net: setattr(net.b, net.name(), 1.0),
    "methodcaller": lambda net: [*map(operator.methodcaller("reset"), net.layers)],
    "reduce": lambda net: functools.reduce(lambda _, one: one.reset(), net.layers, None),
    "chain": lambda net: [one.reset() for one in itertools.chain(net.layers)],
    "sorted": lambda net: sorted(net.layers, key=lambda one: one.reset() or 0),
    "a method's choice": lambda net: net.pick().reset(),
    "a mode": lambda net: net.apply(_freeze),
    "an unbound mode": lambda net: [*map(nn.Module.eval, net.children())],
    "a library's attribute": lambda net: net.apply(_keep),
    "a child": lambda net: setattr(net, "norm"[:4], nn.Identity()),
    "a forward": lambda net: setattr(net.norm, "forward", torch.tanh),
    "a gate": lambda net: setattr(net.get_submodule("b"), "gate", 1.0),
}


def _train(net: Net, schedule: str) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(4):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


@pytest.mark.filterwarnings("ignore:.*first sees")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("way", SETS)
def test_what_another_stage_sets_later_is_refused(way: str, schedule: str) -> None:
    """Attack 46: the last stage changes it in each step, so that a comparison after a step showed
    nothing; or it was set once."""
    with pytest.raises(StateError, match=r"was set during the step|the forward changes"):
        _train(Net(SETS[way]), schedule)


@pytest.mark.parametrize("mean", [Mean, Slotted])
def test_an_objects_attribute_that_another_stage_sets_later_is_refused(mean: Any) -> None:
    with pytest.raises(StateError, match=r"'value' of a \w+ was set during the step.* on stage 0"):
        _train(Net(lambda net: (net.held, net.other)[net.calls < LATE].reset(), mean()), "gpipe")


def test_a_tensor_is_none_of_the_values_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says itself of which micro-batch it is; its truth was asked for."""
    place = types.SimpleNamespace(set_on={1}, used_on={1}, read_on={1}, said_on=set())
    known: Any = types.SimpleNamespace(of=lambda owner, key: place)
    monkeypatch.setattr(attribute_uses, "current_stage", lambda: 0)
    uses, owner = attribute_uses.AttributeUses(known), Mean()
    for tensor in (torch.ones(4), torch.zeros(())):
        has_set = uses.sets(owner, "value")
        owner.value = tensor  # type: ignore[assignment]
        assert has_set is not None
        has_set()
        uses.reads(owner, "value")


def test_what_the_own_stage_or_nobody_reads_may_be_set() -> None:
    """A note of the first stage on the last one's layer; its own mean, which is set anyway."""

    def notes(net: Net) -> None:
        net.b.seen = net.calls  # type: ignore[assignment]
        net.other.reset()
        net.norm.train()

    net = Net(notes)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(4):
        loss = pipe.forward_backward(X, target=Y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (X,), {}, Y, mse_loss, 4))
        assert_same_gradients(net, plain)
    assert net.b.seen == plain.b.seen
    assert net.held.value == pytest.approx(plain.held.value)


class Reads(nn.Module):
    """The first stage sets numbers; the last one may read them, as a count says."""

    def __init__(self, read: Callable[["Reads", bool], float]) -> None:
        super().__init__()
        self.a, self.b, self.read, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), read, 0
        self.wild, self.calm, self.scale = Mean(), Mean(), Scaled()

    def pick(self, is_late: bool) -> Mean:
        return self.wild if is_late else self.calm

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.wild.value = self.scale.gate = x.mean().item()
            h = self.a(x)
        with bp.Block(stage=1):
            self.calls += 1
            return self.b(h) * (1 + self.read(self, self.calls >= LATE))


READS: dict[str, Callable[[Reads, bool], float]] = {
    "a method's choice": lambda net, late: net.pick(late).value,
    "an index": lambda net, late: [net.calm, net.wild][late].value,
    "a name": lambda net, late: getattr(getattr(net, "wild" if late else "calm"), "value", 0.0),
    "vars of a layer": lambda net, late: [net.calm, net.scale][late].__dict__.get("gate", 0.0),
}


@pytest.mark.parametrize("way", READS)
def test_what_another_stage_reads_later_is_refused(way: str) -> None:
    """Attack 46: the data, or a count, choose the object that it reads."""
    with pytest.raises(StateError, match=r"was read during the step|the forward changes"):
        _train(Reads(READS[way]), "gpipe")  # type: ignore[arg-type]


def test_what_another_stage_prints_now_and_then_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    def says(net: Reads, is_late: bool) -> float:
        if is_late:
            print("the mean", net.wild.value)
        return 0.0

    _train(Reads(says), "gpipe")  # type: ignore[arg-type]
    assert "the mean" in capsys.readouterr().out


class Guarded:
    """A class with a ``__setattr__``, a default and a property of its own."""

    value = 0.0

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def double(self) -> float:
        return 2 * self.value

    update, reset = Mean.update, Mean.reset


def test_classes_are_afterwards_as_they_were() -> None:
    """Also after a step that fails, and while it runs for other objects of the class."""
    kinds = (Guarded, Mean, Scaled, nn.Module, nn.BatchNorm1d, nn.Dropout, Slotted)
    before = [dict(vars(kind)) for kind in kinds]
    other, seen = Guarded(), []

    def looks(net: Net) -> None:
        seen.append((other.value, hasattr(other, "missing"), other.double, Guarded.value))
        other.value += 1.0
        del other.value

    _train(Net(looks, Guarded()), "1f1b")
    assert set(seen) == {(0.0, False, 0.0, 0.0)}
    with pytest.raises(StateError):
        _train(Net(lambda net: net.pick().reset(), Guarded()), "1f1b")
    assert [dict(vars(kind)) for kind in kinds] == before


def test_pipelines_in_threads_share_classes() -> None:
    """The one that ends first takes the change off for neither."""
    import threading

    nets = [Net(lambda net: None) for _ in range(3)]
    plains = copy.deepcopy(nets)
    threads = [threading.Thread(target=_train, args=(net, "1f1b")) for net in nets]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with warnings.catch_warnings():
        for net, plain in zip(nets, plains, strict=True):
            for _ in range(4):
                plain.zero_grad()
                plain_step(plain, (X,), {}, Y, mse_loss, 4)
            assert net.held.value == pytest.approx(plain.held.value)
    assert "told_attributes" not in str(nn.Module.__setattr__.__module__)


PARTS: dict[str, Callable[[Net], object]] = {
    "a parameter": lambda net: setattr(net.b, "bias"[:4], None),
    "another parameter": lambda net: net.norm.register_parameter("weight", nn.Parameter(X[0])),
    "a child": lambda net: net.drop.add_module("0", nn.Tanh()),
    "a layer more": lambda net: net.rest.append(nn.Tanh()),
    "a layer less": lambda net: net.rest.__delitem__(0),
    "a buffer": lambda net: net.norm.register_buffer("scale", X[0]),
}


class Parts(Net):
    def __init__(self, late: Callable[[Net], object]) -> None:
        super().__init__(late)
        self.rest = nn.ModuleList([nn.Tanh(), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        for layer in self.rest:
            h = layer(h)
        return h


@pytest.mark.parametrize("way", PARTS)
def test_what_another_stage_makes_a_module_of_later_is_refused(way: str) -> None:
    """Attack 47: a parameter, a child or a buffer is no attribute in the module's dictionary."""
    with pytest.raises(StateError, match=r"was set during the step|the forward changes"):
        _train(Parts(PARTS[way]), "gpipe")


class Counts:
    """Counts, and keeps the latest value."""

    def __init__(self) -> None:
        self.calls, self.latest = 0, 0.0


class OwnCounts(Counts):
    """Those of one stage alone."""


class Counting(nn.Module):
    """Both stages count in one object; each keeps what it has found in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), Counts()
        self.own, self.hits, self.table = (OwnCounts(), Counts()), Counts(), dict[int, Tensor]()

    def count(self, stage: int, h: Tensor) -> Tensor:
        for _ in range(300):
            self.counts.calls += 1
        if 4 in self.table:
            self.hits.calls += 1
        else:
            self.table[4] = torch.arange(4.0)
        self.own[stage].latest = h.detach().mean().item()
        return h * (1 + self.own[stage].latest)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.count(0, self.a(x))
        with bp.Block(stage=1):
            return self.count(1, self.b(h))


def test_what_several_stages_count_is_all_there() -> None:
    """Code of ours between a count's read and its write would let other threads in."""
    net = Counting()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(6):
            pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    finally:
        sys.setswitchinterval(before)
    assert net.counts.calls == 6 * 4 * 2 * 300
    assert net.hits.calls == 6 * 4 * 2 - 1


class Ramp(torch.autograd.Function):
    """Lets gradients in by and by: its backward counts in an object of its stage's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Counts) -> Tensor:
        ctx.counts = counts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.counts.calls += 1
        return gradient * min(1.0, ctx.counts.calls / 10), None


class Ramped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counts = Counts()

    def forward(self, x: Tensor) -> Tensor:
        return Ramp.apply(super().forward(x), self.counts)  # type: ignore[no-any-return]


def test_a_custom_backward_may_count_in_what_its_forward_was_given() -> None:
    """Attack 47: the object was taken for one that the call reads as a whole."""
    net = bp.begin_blocks(nn.Sequential(Ramped(), Ramped()), {"1": 1})
    plain = nn.Sequential(Ramped(), Ramped())
    plain.load_state_dict(net.state_dict())
    assert_trains_as_plain(net, plain, X, Y)


@dataclass
class Counted:
    n: int = 0


class CountsInAnArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, counted: Counted) -> Tensor:
        with bp.Block(stage=0):
            counted.n += 1
            h = self.a(x) / counted.n
        with bp.Block(stage=1):
            return self.b(h)


def test_what_the_engine_reads_of_a_dataclass_is_no_stages() -> None:
    """It looks at the arguments when the last stage has ended."""
    net, counted, others = CountsInAnArgument(), Counted(), Counted()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(3):
        pipe.forward_backward(X, counted, target=Y, loss_fn=mse_loss)
        plain_step(plain, (X, others), {}, Y, mse_loss, 4)
        assert counted == others
    assert_same_gradients(net, plain)
