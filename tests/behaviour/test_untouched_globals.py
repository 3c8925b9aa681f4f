"""State of globals, classes and iterators is as before a recording."""

import array
import functools
import io
import itertools
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError
from blockpipe.restoring import iterators

from ..hiding import hidden
from .restored_objects import refusing

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
    "zip that has ended in part": lambda: _zip_ended_in_part(),
}


def _zip_ended_in_part() -> Iterator[int]:
    """CPython's tuple of its iterators is not whole then."""
    both = itertools.zip_longest([0], itertools.count(-1))
    return map(operator.itemgetter(1), itertools.islice(both, 2, None))


def _in_default_factory() -> Tick:
    numbers = defaultdict[int, int](itertools.count(1).__next__)
    return lambda net: numbers[len(numbers)]


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
    "factory of a defaultdict": _in_default_factory,
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
        match=r"advances the generator .*<genexpr> \(.*test_untouched_globals.py:\d+\), which can be neither "
        r"copied nor put back, at .*test_untouched_globals.py:\d+; count in an attribute",
    ):
        bp.record(net, torch.randn(2, 4))
    assert net.tick(net) == 1


def test_a_tensor_that_somebody_else_keeps_is_found():
    """What no module reaches cannot be put back: an error says who holds it."""
    shelf = hidden(list[Tensor]())

    class Hides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            shelf().append(found.detach())
            return found

    with pytest.raises(
        RecordingError,
        match=r"left a tensor of shape \(2, 4\) .* in a list",
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
    find = hidden(table)

    def far(net: nn.Module) -> Tensor:
        return find()(len(name(4)) * 4)["positions"][0]

    def near(net: nn.Module) -> Tensor:
        return table(len(name(4)) * 4)["positions"][0]

    net = Ticks(far if is_far else near, reads=reads)
    bp.record(net, torch.randn(2, 4))
    assert type(table(4)["positions"][0]) is Tensor
    assert name(4) is kept
