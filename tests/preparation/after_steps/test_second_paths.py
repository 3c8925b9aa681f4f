"""Code that a step runs, and that its recording has not: whatever led there."""

import collections
import copy
import functools
import logging
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe._common.coverage.code_events import IS_FREE
from blockpipe.errors import StateError
from blockpipe.preparation.after_steps import second_paths

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages
from .wild import by_name, named, raises_at, wilds

TABLE = {"k": 1.0}
SPACE = types.SimpleNamespace(k=1.0)


def by_missing(wild: bool, act: Any) -> Any:
    return collections.defaultdict(act, {0: None})[int(wild)]


def by_reduce(wild: bool, act: Any) -> Any:
    return functools.reduce(lambda _, f: f(), [lambda: None, act][: 1 + wild], None)


def by_assert(wild: bool, act: Any) -> Any:
    try:
        assert not wild, act()
    except AssertionError as error:
        return error.args[0]


def by_bus(wild: bool, act: Any) -> Any:
    bus = {"wild": [act]}
    return [handler() for handler in bus.get(named(wild), ())][-1:]


WAYS = [by_missing, by_reduce, by_name, by_assert, by_bus]
PLACES: dict[str, tuple[Callable[[], float], Callable[[float], Any]]] = {
    "an entry": (lambda: TABLE["k"], lambda v: TABLE.__setitem__("k", v)),
    "an attribute": (lambda: SPACE.k, lambda v: setattr(SPACE, "k", v)),
}


class Hidden(nn.Module):
    """One stage sets a value in each forward, and the other one reads it for wild data."""

    def __init__(self, way: Any, place: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way
        self.get, self.put = PLACES[place]

    def read(self) -> float:
        return self.get()

    def forward(self, x: Tensor) -> Tensor:
        wild = bool(x.max() > 50)
        with bp.Block(stage=0):
            h = self.a(x)
            self.put(self.get() + 1)
        with bp.Block(stage=1):
            self.way(wild, self.read)
            return self.b(h)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_source_does_not_tell_is_found_when_it_runs(way: Any, place: str):
    net = Hidden(way, place)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for x in (wilds(), wilds()):
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    with pytest.raises(StateError, match=r"has run .*reads it on hops \[0, 1\]"):
        pipe.forward_backward(x := wilds(2), target=x, loss_fn=F.mse_loss)


class Counts(nn.Module):
    """In the seventh forward, something is read: no micro-batch of the step comes to it again."""

    def __init__(self, shares: bool, grows: str) -> None:
        super().__init__()
        self.a, self.b, self.shares, self.grows = nn.Linear(4, 4), nn.Linear(4, 4), shares, grows
        self.n, self.seen, self.table = 0, list[int](), {"a": 1.0, "b": 1.0}

    def read(self) -> float:
        return self.table["a" if self.shares else "b"]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.table["a"] += 1
        with bp.Block(stage=1):
            self.n += 1
            self.seen.append(self.n)
            if len(self.seen) == 9:
                self.seen.clear()
            count = self.n if self.grows == "a number" else len(self.seen)
            by_name(count == 7, self.read)
            return self.b(h)


@pytest.mark.parametrize("grows", ["a number", "a list"])
def test_what_follows_from_a_count_is_found_too(grows: str):
    """The number is what it was then. For what the list led to, the source of the function is
    read."""
    raises_at(Counts(True, grows), wilds(), wilds(), match=r"has run .*reads it on hops \[1\]")


@pytest.mark.parametrize("grows", ["a number", "a list"])
def test_what_is_a_stages_own_goes_on(grows: str, caplog: pytest.LogCaptureFixture):
    """And it is looked at a few times."""
    net = Counts(False, grows)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    with caplog.at_level(logging.INFO, "blockpipe"):
        for _ in range(6):
            x = wilds()
            found = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss
            assert_close(found, plain_step(plain, (x,), {}, x, F.mse_loss, 4))
    assert_same_gradients(plain, net)
    told = [one for one in caplog.messages if one.startswith("recorded anew: micro-batch")]
    assert 1 <= len(told) <= 4


class Terms(nn.Module):
    """A loss whose terms the data choose."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = [net]

    def of_calm(self) -> float:
        return 1.0

    def of_wild(self) -> float:
        return float(self.net[0].get())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.term(target)()

    def term(self, target: Tensor) -> Any:
        return getattr(self, "of_" + named(bool(target.max() > 50)))


def test_so_is_what_the_loss_comes_to():
    net = Hidden(lambda *_: None, "an entry")
    pipe, loss = bp.Pipeline(net, devices=stages(2), chunks=4), Terms(net)
    x = wilds()
    pipe.forward_backward(x, target=x, loss_fn=loss)
    with pytest.raises(StateError, match=r"has run .*reads it on hops \[0, 1\]"):
        pipe.forward_backward(wilds(2), target=wilds(2), loss_fn=loss)


class Catches(nn.Module):
    """Asks for a value, and goes on without one if there is none."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.a, self.b, self.asks, self.table = nn.Linear(4, 4), nn.Linear(4, 4), asks, {"k": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.table["k"] += 1
        with bp.Block(stage=1):
            try:
                scale = self.table["k"] if self.asks(x) > -1e9 else 1.0
            except (RuntimeError, TypeError):
                scale = 1.0
            return self.b(h) * scale


ASKS: list[Callable[[Tensor], float]] = [
    lambda x: x.abs().max().item(),
    lambda x: float(x.detach().cpu().numpy().max()),
    lambda x: x.detach().flatten().tolist()[0],
    lambda x: len((x.abs() > 0.3).nonzero()),
]


@pytest.mark.parametrize("asks", ASKS)
def test_what_fake_tensors_cannot_tell_is_asked_of_real_ones(asks: Any):
    """The recording took the way of the error that the forward catches."""
    net = Catches(asks)
    assert bp.record(net, wilds()).why_real is not None
    raises_at(net, wilds(), match=r"reads it on hops \[1\]")


def test_what_only_lanes_run_is_looked_at_once():
    """No recording runs there: the thread is another one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def beside(self) -> None:
            self.n += 1

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                by_name(threading.current_thread() is not threading.main_thread(), self.beside)
            with bp.Block(stage=1):
                return self.b(h)

    net = Net()
    pipe, began = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe"), time.time()
    for _ in range(8):
        pipe.forward_backward(wilds(), target=wilds(), loss_fn=F.mse_loss)
    assert time.time() - began < 60


def test_a_forward_that_does_not_run_once_more_is_no_error(tmp_path: Any):
    """A warning says so, where nobody has read the source."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.seen = list[int]()

        def keep(self) -> None:
            (tmp_path / "kept").mkdir()

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                self.seen.append(1)
                by_name(bool(x.max() > 50), self.keep)
            with bp.Block(stage=1):
                return self.b(h)

    net = Net()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for x in (wilds(), wilds(1), wilds()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss
        told = [str(one.message) for one in caught if "the forward has run" in str(one.message)]
        assert len(told) == int(bool(x.max() > 50))
        (tmp_path / "kept").rmdir() if (tmp_path / "kept").exists() else None
        assert_close(found, plain_step(plain, (x,), {}, x, F.mse_loss, 4))
        (tmp_path / "kept").rmdir() if (tmp_path / "kept").exists() else None


def test_there_is_an_end_of_looking(monkeypatch: pytest.MonkeyPatch):
    """One warning, and then nobody looks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h, self.n = self.a(x), self.n + 1
                scope = dict[str, Any]()
                exec("\n" * (self.n % 64) + "def f(): return len(dir())", scope)
                scope["f"]()
            with bp.Block(stage=1):
                return self.b(h)

    monkeypatch.setattr(second_paths, "_MOST", 4)
    pipe = bp.Pipeline(Net(), devices=stages(2), chunks=4, schedule="gpipe")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            pipe.forward_backward(wilds(), target=wilds(), loss_fn=F.mse_loss)
    told = [str(one.message) for one in caught if "the forward has run" in str(one.message)]
    assert len(told) in (1, 2)


@pytest.mark.skipif(IS_FREE, reason="nothing is saved")
def test_a_forward_that_leaves_nothing_is_not_traced(monkeypatch: pytest.MonkeyPatch):
    """Before Python 3.12 a tracer would make its steps slower."""

    class Net(nn.Module):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.keep = self.kept if keeps else self.nothing

        def nothing(self) -> None:
            return None

        def kept(self) -> None:
            self.n = 1

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h)

    class Pure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h)

    noted = list[str]()
    from blockpipe._common.coverage import uncovered_code

    original = uncovered_code.told

    def told(*given: Any) -> Any:
        noted.append("told")
        return original(*given)

    monkeypatch.setattr(uncovered_code, "told", told)
    for net, is_traced in ((Pure(), False), (Net(True), True)):
        noted.clear()
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
        pipe.forward_backward(wilds(), target=wilds(), loss_fn=F.mse_loss)
        assert bool(noted) is is_traced


class Hooked(Hidden):
    """A hook of a gradient reads it, by a method that the data choose."""

    def of_calm(self) -> float:
        return 1.0

    def of_wild(self) -> float:
        return self.get()

    def forward(self, x: Tensor) -> Tensor:
        name = "of_" + named(bool(x.max() > 50))
        with bp.Block(stage=0):
            h = self.a(x)
            self.put(self.get() + 1)
        with bp.Block(stage=1):
            h = h * 2
            h.register_hook(lambda gradient: gradient * by_name(True, getattr(self, name)))
            return self.b(h)


def test_so_is_what_autograd_calls():
    net = Hooked(lambda *_: None, "an entry")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = wilds()
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    with pytest.raises(StateError, match=r"in a backward|on hops \[0\]"):
        pipe.forward_backward(wilds(2), target=wilds(2), loss_fn=F.mse_loss)


class Histories(nn.Module):
    """One stage alone keeps a history for each key of the data."""

    def __init__(self, empty: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.histories = collections.defaultdict[int, Any](empty)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            output, key = self.b(h), int(x[0, 0] * 1000) % 30
            if isinstance(self.histories[key], list):
                self.histories[key].append(float(output.detach().mean()))
                return output * (1 + sum(self.histories[key][-3:]))
            self.histories[key] += float(output.detach().mean())
            return output * (1 + self.histories[key])


@pytest.mark.parametrize("empty", [list, float])
def test_a_table_by_keys_of_data_that_one_stage_has_is_looked_at_once(
    empty: Any, caplog: pytest.LogCaptureFixture
):
    """Each new key cost a recording, until a warning came that there are no more."""
    net = Histories(empty)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    with caplog.at_level(logging.INFO, "blockpipe"):
        for _ in range(10):
            x = wilds()
            found = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss
            assert_close(found, plain_step(plain, (x,), {}, x, F.mse_loss, 4))
    assert len([one for one in caplog.messages if one.startswith("recorded Histories")]) < 12
