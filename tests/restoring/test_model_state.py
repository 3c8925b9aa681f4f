"""A recording leaves no trace: not on objects of the user's, however deep, nor on parameters."""

import array
import copy
import dataclasses
import functools
import io
import itertools
import random
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError
from blockpipe.restoring import iterators
from blockpipe.restoring import model_state as snapshot
from blockpipe.restoring.model_state import ModelState, WritesUndone

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import assert_close, stages


class State:
    """A plain object: a moving average, a counter, containers in containers, generators."""

    __slots__ = ("__dict__", "_ema", "slot")

    def __init__(self):
        self.ema, self.count, self.slot = None, 0, None
        self.nested = {"lists": [[0], deque([1])], "sets": ({1},), "user": UserDict(a=0)}
        self.python = random.Random(0)
        self.seen = []
        numpy = pytest.importorskip("numpy")
        self.numpy, self.array = numpy.random.default_rng(0), numpy.zeros(2)
        self.tensor = torch.zeros(2)

    @property
    def ema(self):
        return self._ema

    @ema.setter
    def ema(self, value):
        self._ema = value

    def step(self, h):
        """What a forward does to it; what it gives depends on all of it."""
        m = h.detach().abs().mean()
        self.ema = m if self.ema is None else 0.9 * self.ema + 0.1 * m
        self.count += 1
        self.slot = m
        self.nested["lists"][0][0] += 1
        self.nested["lists"][1].append(self.count)
        self.nested["sets"][0].add(self.count)
        self.nested["user"]["a"] += 1
        self.seen.append(m)
        self.array += 1
        drawn = self.python.random() + self.numpy.random() + self.array.sum()
        counted = self.count + len(self.seen) + self.nested["lists"][0][0]
        return h / self.ema * (1 + 0.01 * drawn + 0.01 * counted)


class Net(nn.Module):
    def __init__(self, *, reads):
        super().__init__()
        self.a, self.k, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.state, self.reads = State(), reads

    def forward(self, x):
        with bp.Block(0):
            h = self.k(self.state.step(self.a(x)))
        with bp.Block(1):
            if self.reads and h.sum().item() > 1e9:
                return h
            return self.b(h)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("reads", [False, True])
def test_state_of_plain_objects_is_put_back(reads):
    """Also where the recording is a real run: five steps train as the plain loop's."""
    net = Net(reads=reads)
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (net, plain)]
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            if model is net:
                loss = pipe.forward_backward(x, loss_fn=square).loss
            else:
                expected = plain_step(plain, (x,), {}, None, square, 2)
        assert difference(net, plain, loss, expected).same
        for _, optimizer in pairs:
            optimizer.step()
    assert net.state.count == plain.state.count == 10
    assert type(net.state.ema) is torch.Tensor


class InPlace(nn.Linear):
    """Plain tensors, one of them nobody's attribute, that are written in place."""

    count = torch.zeros(3)

    def __init__(self, *, reads):
        super().__init__(4, 4)
        self.reads, self.total, self.nested = reads, torch.zeros(()), [torch.zeros(2)]

    def forward(self, x):
        self.total += 1
        self.nested[0][0].mul_(2).add_(3)
        if not self.reads:
            InPlace.count += 1
        return super().forward(x if not self.reads or x.sum() < 1e9 else -x)


@pytest.mark.parametrize("reads", [False, True])
def test_plain_tensors_that_are_written_in_place_are_put_back(reads):
    """torch computes on real tensors in the midst of fake ones."""
    net = InPlace(reads=reads)
    pipe = bp.Pipeline(net, devices=stages(1), chunks=2)
    x = torch.ones(4, 4)
    bp.record(net, x)
    pipe.summary(x)
    pipe.memory(x)
    assert not net.total
    assert not net.nested[0].any()
    assert not net.count.any()


def test_what_hooks_hold_in_their_closures_is_put_back():
    """A list that is filled, and a name that is bound anew."""
    net, seen, count = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [], 0

    def hook(module, args, output):
        nonlocal count
        count += 1
        seen.append(output)

    net[0].register_forward_hook(hook)
    bp.record(net, torch.randn(2, 4))
    assert (seen, count) == ([], 0)


class Frozen(OrderedDict):
    """As diffusers' configurations are: nobody writes."""

    def refuse(self, *args, **kwargs):
        raise TypeError("frozen")

    update = clear = pop = setdefault = __setitem__ = __delitem__ = refuse

    def __init__(self, pairs):
        for key, value in pairs.items():
            OrderedDict.__setitem__(self, key, value)


def refusing(base):
    """A container whose methods refuse."""

    class Refuses(base):
        def clear(self):
            raise TypeError("refused")

        extend = update = append = clear

    return Refuses


@dataclasses.dataclass(frozen=True)
class Point:
    at: list


def test_what_refuses_is_put_back_all_the_same():
    """By the built-in classes' own methods, and only what has changed."""

    class Writes(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.config = Frozen({"a": 1})
            self.kept = [refusing(kind)([1]) for kind in (list, set, deque)]
            self.table = refusing(dict)(a=1)
            self.point = Point([])

        def forward(self, x):
            list.append(self.kept[0], 2)
            set.add(self.kept[1], 2)
            deque.append(self.kept[2], 2)
            dict.update(self.table, b=2)
            self.point.at.append(x)
            object.__setattr__(self.point, "more", x)
            return super().forward(x)

    net = nn.Sequential(Writes(), nn.Linear(4, 4))
    bp.record(net, torch.randn(2, 4))
    assert [list(kept) for kept in net[0].kept] == [[1]] * 3
    assert (dict(net[0].table), dict(net[0].config)) == ({"a": 1}, {"a": 1})
    assert vars(net[0].point) == {"at": []}


class Momentum(nn.Module):
    """A real recording, for a value is read; writes to a parameter, and has a backward of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with bp.Block(0):
            with torch.no_grad():
                self.k.weight.mul_(0.9).add_(self.q.weight, alpha=0.1)
                self.k.bias.data = self.k.bias.data * 0.5
            h = self.k(x)
            with torch.enable_grad():
                self.q(x.detach()).square().mean().backward()
        with bp.Block(1):
            if h.detach().sum().item() > 1e9:
                return h
            return self.b(h)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("look", ["record", "summary", "memory"])
def test_a_real_recording_does_not_train(look, gradients):
    """Parameters, their storage and their gradients are as before."""
    net, x = Momentum(), torch.randn(8, 6)
    if gradients:
        net(x).sum().backward()
    before = [
        (p.detach().clone(), p.grad, None if p.grad is None else p.grad.clone())
        for p in net.parameters()
    ]
    storages = [p.data_ptr() for p in net.parameters()]
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    recording = bp.record(net, x) if look == "record" else getattr(pipe, look)(x) and pipe.recording
    assert recording is None or recording.why_real
    assert [p.data_ptr() for p in net.parameters()] == storages
    for p, (value, gradient, its_value) in zip(net.parameters(), before, strict=True):
        assert_close(p.detach(), value)
        assert p.grad is gradient
        if gradient is not None:
            assert_close(gradient, its_value)


def test_copies_are_made_of_what_is_written_only():
    """A forward that writes to no parameter needs no memory for them."""
    net = Momentum()
    with WritesUndone(net) as undone, torch.no_grad():
        net.b(torch.randn(2, 6))
        assert undone._copies == []
        net.k.weight.zero_()
        net.k.weight.zero_()
        assert len(undone._copies) == 1
    assert net.k.weight.abs().sum() > 0


def test_what_is_far_is_left_alone(monkeypatch):
    """A trainer may be in reach, and its data set with it: what is near comes first."""
    net = nn.Linear(2, 2)
    net.near, net.far = [0], [[[object()] for _ in range(100)]]
    monkeypatch.setattr(snapshot, "MOST_OBJECTS", 30)
    state = ModelState(net, values=False)
    net.near[0] = 1
    net.far[0][50][0] = None
    state.restore()
    assert net.near == [0]
    assert net.far[0][50][0] is None


AVERAGE: dict[str, Tensor] = {}
CALLS = 0


def _averaged(value: Tensor) -> Tensor:
    before = AVERAGE.get("mean")
    AVERAGE["mean"] = value if before is None else 0.9 * before + 0.1 * value
    return AVERAGE["mean"]


class KeepsGlobally(nn.Module):
    """State in globals that a helper reads, and in the class."""

    seen: ClassVar[list[Tensor]] = []
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        type(self).count += 1
        h = self.a(x)
        self.seen.append(h.detach())
        return self.b(h / _averaged(h.detach().abs().mean()))


def test_state_in_globals_and_in_classes_is_as_before_a_recording():
    """Fake tensors leaked into the first step from there, and no parameter was trained."""
    model = KeepsGlobally()
    bp.record(model, torch.ones(2, 4))
    assert (AVERAGE, CALLS, KeepsGlobally.seen, KeepsGlobally.count) == ({}, 0, [], 0)


TICKS = 0
TICKET: Iterator[int] = itertools.count(1)
SETTINGS = types.ModuleType("settings")
Tick = Callable[[nn.Module], Any]  # each call of one gives the next number, from 1 on


def _in_class_of_globals() -> Tick:
    def tick(net: nn.Module) -> int:
        Namespace.calls += 1
        return Namespace.calls

    Namespace.calls = 0
    return tick


class Namespace:
    """Nobody makes an object of it."""

    calls = 0
    odometer = types.SimpleNamespace()


def _in_list_of_class() -> Tick:
    class Stats:
        seen: ClassVar[list[int]] = []

    def tick(net: nn.Module) -> int:
        Stats.seen.append(1)
        return len(Stats.seen)

    return tick


def _in_object_of_class() -> Tick:
    Namespace.odometer.km = 0
    return lambda net: _drive(Namespace.odometer)


def _in_class_that_has_no_number_yet() -> Tick:
    class Stats:
        pass

    return lambda net: _drive(Stats)


def _in_metaclass() -> Tick:
    class Meta(type):
        km = 0

        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("refused")

    class Stats(metaclass=Meta):
        pass

    return lambda net: _drive(type(Stats))


def _in_class_that_refuses() -> Tick:
    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("refused")

    class Stats(metaclass=Meta):
        calls = 0

    def tick(net: nn.Module) -> int:
        type.__setattr__(Stats, "calls", Stats.calls + 1)
        return Stats.calls

    return tick


def _in_global_of_call() -> Tick:
    global TICKS
    TICKS = 0

    class Adder:
        def __call__(self, net: nn.Module) -> int:
            global TICKS
            TICKS += 1
            return TICKS

    return Adder()


def _in_new_global() -> Tick:
    globals().pop("LATE", None)

    def tick(net: nn.Module) -> int:
        global LATE
        try:
            LATE += 1
        except NameError:
            LATE = 1
        return LATE

    return tick


def _in_global_iterator() -> Tick:
    global TICKET
    TICKET = itertools.count(1)
    return lambda net: next(TICKET)


def _in_module() -> Tick:
    SETTINGS.calls = 0

    def tick(net: nn.Module) -> int:
        SETTINGS.calls += 1
        return SETTINGS.calls

    return tick


def _in_module_of_closure() -> Tick:
    settings = types.ModuleType("settings")
    settings.inner = types.ModuleType("settings.inner")
    settings.inner.calls = 0

    def tick(net: nn.Module) -> int:
        settings.inner.calls += 1
        return settings.inner.calls

    return tick


def _in_default() -> Tick:
    def tick(net: nn.Module, ticket: Iterator[int] = itertools.count(1)) -> int:  # noqa: B008
        return next(ticket)

    return tick


def _on_parameter() -> Tick:
    return lambda net: _drive(net.a.weight)


def _in_array_of_objects() -> Tick:
    numpy = pytest.importorskip("numpy")
    held = numpy.empty(1, dtype=object)
    held[0] = []
    return lambda net: held[0].append(1) or len(held[0])


def _in_file() -> Tick:
    file = io.StringIO()
    return lambda net: file.write("a") and file.tell()


def _in_bytes(held: Any) -> Tick:
    def tick(net: nn.Module) -> Any:
        held[0] += 1
        return held[0]

    return tick


def _drive(odometer: Any) -> Any:
    odometer.km = getattr(odometer, "km", 0) + 1
    return odometer.km


ITERATORS: dict[str, Callable[[], Any]] = {
    "count": lambda: itertools.count(1),
    "range": lambda: iter(range(1, 9)),
    "list": lambda: iter([1, 2, 3]),
    "reversed": lambda: reversed((3, 2, 1)),
    "dict": lambda: iter({1: "a", 2: "b"}),
    "cycle": lambda: itertools.cycle(iter([1, 2, 3])),
    "chain of map": lambda: itertools.chain(map(int, iter("1")), [2, 3]),
    "tee": lambda: itertools.tee(range(1, 9))[0],
}


def _of_iterator(make: Callable[[], Any]) -> Tick:
    """In a list, in a tuple."""
    held = [(make(),)]
    return lambda net: next(held[0][0])


def _of_call(call: Callable[[], int]) -> Tick:
    return lambda net: call()


COUNTS: dict[str, Callable[[], Tick]] = {
    "class of globals": _in_class_of_globals,
    "list of a class": _in_list_of_class,
    "object of a class": _in_object_of_class,
    "class that has no number yet": _in_class_that_has_no_number_yet,
    "metaclass": _in_metaclass,
    "class that refuses": _in_class_that_refuses,
    "global of __call__": _in_global_of_call,
    "new global": _in_new_global,
    "global iterator": _in_global_iterator,
    "module": _in_module,
    "module of a closure": _in_module_of_closure,
    "iterator as a default": _in_default,
    "parameter": _on_parameter,
    "array of objects": _in_array_of_objects,
    "file in memory": _in_file,
    "bytearray": lambda: _in_bytes(bytearray(1)),
    "array": lambda: _in_bytes(array.array("d", [0])),
    "dict subclass": lambda: functools.partial(lambda o, net: _drive(o), refusing(dict)()),
    "list subclass": lambda: functools.partial(lambda o, net: _drive(o), refusing(list)()),
    "tensor": lambda: functools.partial(lambda o, net: _drive(o), torch.zeros(1)),
    "method of an iterator": lambda: _of_call(itertools.count(1).__next__),
    "partial of an iterator": lambda: _of_call(functools.partial(next, itertools.count(1))),
    **{f"iterator: {k}": functools.partial(_of_iterator, make) for k, make in ITERATORS.items()},
}


class Ticks(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self, tick: Tick, *, reads: bool) -> None:
        super().__init__()
        self.a, self.tick, self.reads = nn.Linear(4, 4), tick, reads

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.reads and h.sum() > 1e9:
            return h
        return h * self.tick(self)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kind", COUNTS)
def test_a_number_is_as_before_a_recording_wherever_it_is_kept(kind: str, reads: bool) -> None:
    """The calls after a recording get the numbers that they would have got without it."""
    net, x = Ticks(COUNTS[kind](), reads=reads), torch.randn(2, 4)
    for expected in (1, 2):
        assert (bp.record(net, x).why_real is not None) == reads
        assert net.tick(net) == expected


def test_an_iterator_that_two_hold_is_one_in_the_recording_too() -> None:
    """The second to ask gets the second number; afterwards both hold the original."""
    ticket = itertools.count(1)
    net = nn.Sequential(Ticks(lambda net: next(net.ticket), reads=False), nn.Identity())
    net[0].ticket, net[1].ticket = ticket, ticket

    def second(module: Any, args: Any) -> None:
        assert next(module.ticket) == 2

    net[1].register_forward_pre_hook(second)
    bp.record(net, torch.randn(2, 4))
    assert net[0].ticket is net[1].ticket is ticket
    assert next(ticket) == 1


@pytest.mark.parametrize("reads", [False, True])
def test_a_generator_that_a_recording_would_advance_is_an_error(reads: bool) -> None:
    """It stays where it was, and the error says which one it is."""
    numbers = (number for number in range(1, 9))
    net = Ticks(lambda net: next(numbers), reads=reads)
    with pytest.raises(
        RecordingError,
        match=r"advances the generator .*<genexpr> \(.*test_model_state.py:\d+\), which can be neither "
        r"copied nor put back, at .*test_model_state.py:\d+; count in an attribute",
    ):
        bp.record(net, torch.randn(2, 4))
    assert net.tick(net) == 1


def test_a_tensor_that_somebody_else_keeps_is_found():
    """What no module reaches cannot be put back: an error says who holds it."""
    kept: list[Tensor] = []
    keep = kept.append  # nothing is to be seen in it

    class Hides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            keep(found.detach())
            return found

    with pytest.raises(
        RecordingError, match=r"left a tensor of shape \(2, 4\) .* in a list, in a builtin"
    ):
        bp.record(nn.Sequential(Hides(4, 4)), torch.ones(2, 4))


def test_an_iterator_that_nobody_advances_need_not_bear_a_copy() -> None:
    """One of pairs, and one whose dictionary has changed since."""
    table = {1: 1}
    net = Ticks(lambda net: 1, reads=False)
    net.held = held = [iter(table), itertools.pairwise([1, 2])]
    table[2] = 2
    before = list(held)
    bp.record(net, torch.randn(2, 4))
    assert all(a is b for a, b in zip(held, before, strict=True))
    assert next(held[1]) == (1, 2)


def test_an_interrupt_while_iterators_are_lent_leaves_them_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was lent so far comes back."""
    net = Ticks(lambda net: 1, reads=False)
    net.held = held = [itertools.count(1), itertools.pairwise([])]
    before = list(held)

    def interrupt(what: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(iterators, "_refusing", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bp.record(net, torch.randn(2, 4))
    assert all(a is b for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize(
    ("is_far", "reads"), [(False, False), (False, True), (True, False)], ids=["", "reads", "far"]
)
@pytest.mark.parametrize("caches", [functools.lru_cache, functools.cache, functools.lru_cache(2)])
def test_a_table_that_is_cached_is_made_anew_after_a_recording(
    caches: Callable[..., Any], reads: bool, is_far: bool
) -> None:
    """The cache would give the next step the recording's fake tensor; others stay as they are."""

    @caches
    def table(size: int) -> dict[str, tuple[Tensor, ...]]:
        return {"positions": (torch.linspace(0, 1, size),)}

    @caches
    def name(size: int) -> list[int]:
        return [size]

    kept = name(4)
    find = {"table": table}.__getitem__  # no walk comes by it

    def far(net: nn.Module) -> Tensor:
        return find("table")(len(name(4)) * 4)["positions"][0]

    def near(net: nn.Module) -> Tensor:
        return table(len(name(4)) * 4)["positions"][0]

    net = Ticks(far if is_far else near, reads=reads)
    bp.record(net, torch.randn(2, 4))
    assert type(table(4)["positions"][0]) is Tensor
    assert name(4) is kept
