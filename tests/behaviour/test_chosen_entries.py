"""Entries of containers, and containers, that data or a count choose for another stage to find."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 32).view(8, 4)
HOT = torch.cat([X[:2], X[2:4] + 5, X[4:6], X[6:] + 5])


class Net(nn.Module):
    """The first stage sets an entry that the data, or a count, choose; the last one reads one, and
    may set it in each forward."""

    def __init__(self, put: Callable[[Any, bool], object], get: str, *, updates: bool) -> None:
        super().__init__()
        self.a, self.b, self.calls, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), 0, False
        self.put, self.get, self.updates = put, get, updates
        self.table = {"own": 0.0, "other": 0.0}
        self.first, self.second = {"own": 0.0}, {"own": 0.0}
        self.tables = [self.second, self.first]
        self.numbers, self.found = [0.0, 0.0], defaultdict[str, float](float)
        self.array, self.recent = np.zeros(2), deque([0.0], maxlen=3)
        self.older = deque([0.0], maxlen=3)

    def key(self, is_hot: bool) -> str:
        return "own" if is_hot else "other"

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            is_hot = self.calls > 9 if self.counts else bool(x.max() > 3)
            self.put(self, is_hot)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) * (1 + self.read(h))

    def read(self, h: Tensor) -> float:
        held: Any = getattr(self, self.get)
        if self.get == "recent":
            held.extend([0.5] if self.updates else [])
            return float(sum(held))
        key: Any = 1 if self.get in ("numbers", "array") else "own"
        if self.updates:
            held[key] = 0.9 * held[key] + 0.1
        return float(held[key])


def _in_branches(net: Any, is_hot: bool) -> None:
    key = "other"
    if is_hot:
        key = "own"
    net.table[key] = 1.0


PUTS: dict[str, tuple[Callable[[Any, bool], object], str]] = {
    "a key": (lambda n, hot: n.table.__setitem__("own" if hot else "other", 1.0), "table"),
    "a key in branches": (_in_branches, "table"),
    "a key of a method": (lambda n, hot: n.table.update({n.key(hot): 1.0}), "table"),
    "one of several": (lambda n, hot: n.tables[hot].update(own=1.0), "first"),
    "one of two": (lambda n, hot: (n.first if hot else n.second).update(own=1.0), "first"),
    "a name": (lambda n, hot: getattr(n, "first" if hot else "second").update(own=1.0), "first"),
    "an index": (lambda n, hot: n.numbers.__setitem__(int(hot), 1.0), "numbers"),
    "an element": (lambda n, hot: n.array.__setitem__(int(hot), 1.0), "array"),
    "a queue": (lambda n, hot: (n.recent if hot else n.older).append(1.0), "recent"),
    "a default": (lambda n, hot: n.found.__setitem__(n.key(hot), 1.0), "found"),
}


def _train(net: nn.Module) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for x in (X, X, HOT, HOT):
        pipe.forward_backward(x, target=Y, loss_fn=mse_loss)


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("way", PUTS)
def test_what_another_stage_sets_when_it_is_chosen_later_is_refused(
    way: str, counts: bool, updates: bool
) -> None:
    """Attack 46: where the last stage sets it as well, or it is set once, nobody looked."""
    net = Net(*PUTS[way], updates=updates)
    net.counts = counts
    with pytest.raises(StateError, match=r"the forward changes|was (set|written) during the step"):
        _train(net)


class Direct(Net):
    """In its own code, and not by a method of the container's."""

    def __init__(self, *, updates: bool) -> None:
        super().__init__(lambda net, is_hot: None, "table", updates=updates)
        self.put = lambda net, is_hot: net.sets(is_hot)

    def sets(self, is_hot: bool) -> None:
        self.table["own" if is_hot else "other"] = 1.0


class ByMethod(Direct):
    def sets(self, is_hot: bool) -> None:
        self.table[self.key(is_hot)] = 1.0


class ByIndex(Direct):
    def sets(self, is_hot: bool) -> None:
        self.get = "first"
        self.tables[is_hot]["own"] = 1.0


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", [Direct, ByMethod, ByIndex])
def test_what_the_code_itself_sets_when_it_is_chosen_later_is_refused(
    kind: Callable[..., Direct], counts: bool, updates: bool
) -> None:
    net = kind(updates=updates)
    net.counts = counts
    with pytest.raises(StateError, match=r"the forward changes|was set during the step"):
        _train(net)


class Bins(nn.Module):
    """Each stage counts in a table of its own, under keys that the data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bins: dict[str, dict[int, float]] = {"a": {}, "b": {}}

    def counted(self, name: str, h: Tensor) -> Tensor:
        at = int(h.detach().abs().mean() * 10) % 3
        self.bins[name][at] = self.bins[name].get(at, 0.0) + 1.0
        return h / self.bins[name][at]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.counted("a", self.a(x))
        with bp.Block(stage=1):
            return self.counted("b", self.b(h))


def test_each_stage_may_have_a_table_of_which_data_choose_the_entry() -> None:
    net = Bins()
    plain = copy.deepcopy(net)
    _train(net)
    for part in torch.cat([X, X, HOT, HOT]).chunk(16):
        plain(part)
    assert net.bins == plain.bins


class Members(nn.Module):
    """The first stage adds what the data, or a count, choose to a set; the last one asks for one."""

    def __init__(self, add: Callable[[set[str], bool], object], *, adds: bool) -> None:
        super().__init__()
        self.a, self.b, self.calls, self.counts = nn.Linear(4, 4), nn.Linear(4, 4), 0, False
        self.seen, self.add, self.adds = {"cold"}, add, adds

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            is_hot = self.calls > 9 if self.counts else bool(x.max() > 3)
            self.add(self.seen, is_hot)
            h = self.a(x)
        with bp.Block(stage=1):
            if self.adds:
                self.seen.add("last")
            return self.b(h) * (1 + ("hot" in self.seen))


def _adds_in_branches(seen: set[str], is_hot: bool) -> None:
    key = "cold"
    if is_hot:
        key = "hot"
    seen.add(key)


ADDS: dict[str, Callable[[set[str], bool], object]] = {
    "one of two": lambda seen, hot: seen.add("hot" if hot else "cold"),
    "one of several": lambda seen, hot: seen.add(["cold", "hot"][hot]),
    "in branches": _adds_in_branches,
    "several": lambda seen, hot: seen.update(["hot"] * hot),
}


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("way", ADDS)
def test_a_member_that_another_stage_adds_later_is_refused(
    way: str, counts: bool, adds: bool
) -> None:
    net = Members(ADDS[way], adds=adds)
    net.counts = counts
    with pytest.raises(StateError, match=r"the forward changes|was set during the step"):
        _train(net)


SAID = set[str]()


class WarnsOnce(nn.Module):
    """Both stages say once what they have to say: the same, or something of their own."""

    def __init__(self, *said: str) -> None:
        super().__init__()
        self.a, self.b, self.said = nn.Linear(4, 4), nn.Linear(4, 4), said
        SAID.clear()

    def says(self, text: str) -> None:
        if text not in SAID:
            SAID.add(text)
            print(text)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.says(self.said[0])
            h = self.a(x)
        with bp.Block(stage=1):
            self.says(self.said[1])
            return self.b(h)


@pytest.mark.parametrize("said", [("no mask", "no kernel"), ("no mask", "no mask")])
def test_stages_may_say_something_once(
    said: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Attack 47: with a set, and not a dictionary, it was refused."""
    _train(WarnsOnce(*said))
    assert sorted(capsys.readouterr().out.split("\n")[:-1]) == sorted(set(said))


class Scales(nn.Module):
    """Both stages make a number at the first call, and keep it."""

    def __init__(self, **known: float) -> None:
        super().__init__()
        self.a, self.b, self.scales = nn.Linear(4, 4), nn.Linear(4, 4), known

    def scale(self, name: str) -> float:
        return self.scales.setdefault(name, len(name) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.scale("head")
        with bp.Block(stage=1):
            return self.b(h) * self.scale("head")


@pytest.mark.parametrize("known", [{}, {"head": 0.5}])
def test_both_stages_may_make_a_number_once(known: dict[str, float]) -> None:
    """Attack 47: by `setdefault` it was refused, also where it was there before."""
    net = Scales(**known)
    _train(net)
    assert net.scales == {"head": 0.5}
