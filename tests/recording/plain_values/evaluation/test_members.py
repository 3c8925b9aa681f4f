"""Where a read may find what it names."""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.recording.plain_values.evaluation.members import owners_of

from ....alike import check_trains_alike
from ....models import square
from ....stage_devices import stages


class Kind(type):
    scale = 0.0


class Options(metaclass=Kind):
    depth = 1


class More(Options):
    pass


@pytest.fixture(autouse=True)
def _scale_is_put_back() -> Iterator[None]:
    yield
    Kind.scale = 0.0


class Net(nn.Module):
    def __init__(self, reads: type) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            Kind.scale = float(x.detach().sum())
        with bp.Block(stage=1):
            return self.b(x) * self.reads.scale


def test_a_read_may_be_about_classes_and_metaclasses() -> None:
    """Up to the one that has the name."""
    more = More()
    assert list(owners_of(more, "depth")) == [more, More, Options]
    assert list(owners_of(More, "scale")) == [More, Options, object, Kind]


@pytest.mark.parametrize("reads", [Kind, Options, More])
def test_what_a_stage_sets_on_a_metaclass_and_another_reads_is_refused(reads: type) -> None:
    """Read through a class of it, too."""
    pipe = bp.Pipeline(Net(reads), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"the forward changes Kind\.scale"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class Policy:
    __slots__ = ("act",)
    k = 1.0

    gain = property(lambda _: 1.0)

    def rate(self) -> float:
        return 1.0


class Plain:
    def rate(self) -> float:
        return 1.0


class Double:
    def rate(self) -> float:
        return 2.0


class Based(Plain):
    pass


def scaled(h: Tensor, *, by: float = 1.0) -> Tensor:
    return h * by


def halved(h: Tensor, *, by: float = 1.0) -> Tensor:
    return h / 2


class Calm:
    gain = 1.0


class Wild(Calm):
    gain = 2.0


def doubled(h: Tensor) -> Tensor:
    return 2 * h


def same(h: Tensor) -> Tensor:
    return h


ACT: Callable[[Tensor], Tensor] = same
SCALE = 1.0
THIS = sys.modules[__name__]
POLICY, STATE, BASED = Policy(), Calm(), Based()


def _set_global(net: Any, v: float) -> None:
    global ACT
    ACT = doubled if v > 0 else same


def _set_slot(net: Any, v: float) -> None:
    POLICY.act = net.kinds[0] if v > 0 else net.kinds[1]


def _set_method(net: Any, v: float) -> None:
    Policy.rate = lambda _: v  # type: ignore[method-assign, assignment]


def _set_property(net: Any, v: float) -> None:
    Policy.gain = property(lambda _: v)


def _set_class(net: Any, v: float) -> None:
    STATE.__class__ = Wild if v > 0 else Calm


def _set_bases(net: Any, v: float) -> None:
    Based.__bases__ = (Double,) if v > 0 else (Plain,)


def _set_default(net: Any, v: float) -> None:
    scaled.__kwdefaults__["by"] = v


def _set_defaults(net: Any, v: float) -> None:
    scaled.__kwdefaults__ = {"by": v}


def _set_code(net: Any, v: float) -> None:
    scaled.__code__ = (halved if v > 0 else same).__code__


def _set_of_class(net: Any, v: float) -> None:
    Policy.k = v


def _set_by_partial(net: Any, v: float) -> None:
    functools.partial(setattr, THIS, "SCALE")(v)


def _set_by_map(net: Any, v: float) -> None:
    list(map(setattr, [THIS], ["SCALE"], [v]))


def _set_in_dict(net: Any, v: float) -> None:
    THIS.__dict__["SCALE"] = v


def _update(net: Any, v: float) -> None:
    vars(THIS).update(SCALE=v)


def _set_of_module(net: Any, v: float) -> None:
    THIS.SCALE = v  # type: ignore[attr-defined]


def _set_of_parameter(net: Any, v: float) -> None:
    net.a.weight.k = v


LEADS: dict[str, tuple[Callable[[Any, float], None], Callable[[Any, Tensor], Tensor]]] = {
    "a function in a global": (_set_global, lambda net, h: ACT(h)),
    "a function in a slot": (_set_slot, lambda net, h: POLICY.act(h)),
    "a method": (_set_method, lambda net, h: h * POLICY.rate()),
    "a property": (_set_property, lambda net, h: h * POLICY.gain),
    "a class, by isinstance": (_set_class, lambda net, h: 2 * h if isinstance(STATE, Wild) else h),
    "a class, by type": (_set_class, lambda net, h: h if type(STATE) is Calm else 2 * h),
    "the bases of a class": (_set_bases, lambda net, h: h * BASED.rate()),
    "a default": (_set_default, lambda net, h: scaled(h)),
    "the defaults": (_set_defaults, lambda net, h: scaled(h)),
    "the code": (_set_code, lambda net, h: scaled(h)),
    "vars of a class": (_set_of_class, lambda net, h: h * vars(Policy)["k"]),
    "a copy of these": (_set_of_class, lambda net, h: h * {**vars(Policy)}["k"]),
    "get of these": (_set_of_class, lambda net, h: h * Policy.__dict__.get("k", 0.0)),
    "a partial setattr": (_set_by_partial, lambda net, h: h * SCALE),
    "a map of setattr": (_set_by_map, lambda net, h: h * SCALE),
    "a module's __dict__": (_set_in_dict, lambda net, h: h * SCALE),
    "update of a module's vars": (_update, lambda net, h: h * SCALE),
    "a module's attrgetter": (
        _set_of_module,
        lambda net, h: h * operator.attrgetter("SCALE")(THIS),
    ),
    "a module's vars": (_set_of_module, lambda net, h: h * dict(vars(THIS))["SCALE"]),
    "a module by getattr_static": (
        _set_of_module,
        lambda net, h: h * inspect.getattr_static(THIS, "SCALE"),
    ),
    "dir": (
        _set_of_module,
        lambda net, h: h * getattr(THIS, next(n for n in dir(THIS) if n == "SCALE")),
    ),
    "a parameter's vars": (
        _set_of_parameter,
        lambda net, h: h * max(n for n in vars(net.a.weight).values() if isinstance(n, float)),
    ),
}


class Leads(nn.Module):
    """One stage sets what leads to a number, or to code, and the other one follows it."""

    def __init__(self, lead: str, sets_on: int, reads_on: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.set, self.read = LEADS[lead]
        self.on, self.kinds = (sets_on, reads_on), [doubled, same]

    def forward(self, x: Tensor) -> Tensor:
        sets_on, reads_on = self.on
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage):
                x = layer(x)
                if stage == sets_on:
                    self.set(self, x.sum().item())
                if stage == reads_on:
                    x = self.read(self, x)
        return x


@pytest.fixture
def leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is set is there, and put back after the test."""
    monkeypatch.setitem(globals(), "ACT", same)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(globals(), "STATE", Calm())
    monkeypatch.setattr(Policy, "k", 1.0)
    monkeypatch.setattr(Policy, "rate", Policy.rate)
    monkeypatch.setattr(Policy, "gain", Policy.gain)
    POLICY.act = same
    for name in ("__code__", "__kwdefaults__"):
        monkeypatch.setattr(scaled, name, getattr(scaled, name))
    scaled.__kwdefaults__ = {"by": 1.0}
    yield
    Based.__bases__ = (Plain,)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("sets_on", [0, 1])
def test_what_leads_to_code_or_numbers_when_stages_share_it_is_refused(
    lead: str, sets_on: int, leads_nowhere: None
) -> None:
    """Functions and classes as values were taken for definitions, and the dictionaries of modules,
    classes and parameters were nobody's: other numbers, silently."""
    net = Leads(lead, sets_on, 1 - sets_on)
    net.a.weight.k = 1.0
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


@pytest.mark.parametrize("lead", LEADS)
def test_what_leads_there_on_one_stage_is_the_plain_loops(lead: str, leads_nowhere: None) -> None:
    net = Leads(lead, 1, 1)
    net.a.weight.k = 1.0
    check_trains_alike(net)
