"""What a forward does beside computing, and a recording of it must not leave behind."""

import copy
import csv
import ctypes
import functools
import hashlib
import queue
import random
import re
import sqlite3
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

CACHES = [functools.cache, functools.lru_cache, functools.lru_cache(1)]


class Net(nn.Module):
    """Calls a function of a test's on stage 0, and another one on stage 1."""

    def __init__(self, held: object, first: Callable[[Any], Any], second: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held, self.first, self.second = held, first, second
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.found.append(self.first(self.held))
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) if self.second is None else self.b(h) * self.second(self.held)


def _found(net: Net, samples: int = 4) -> list[Any]:
    """Return what a step with two micro-batches has found on stage 0."""
    with torch.no_grad():
        bp.Pipeline(net, devices=stages(2), chunks=2)(torch.randn(samples, 4))
    return net.found


# --- caches


@pytest.mark.parametrize("caches", CACHES)
def test_a_cached_function_when_it_is_recorded_has_its_effect_in_the_step(caches: Any) -> None:
    """The cache kept its result, while its entry in the table was put back."""
    table: dict[int, int] = {}

    @caches
    def make(size: int) -> None:
        table[size] = size

    assert _found(Net(4, lambda size: (make(size), table.get(size)))) == [(None, 4)] * 2


@pytest.mark.parametrize("caches", CACHES)
def test_a_cached_method_when_it_is_recorded_has_its_effect_in_the_step(caches: Any) -> None:
    class Table:
        def __init__(self) -> None:
            self.size = 0

        @caches
        def make(self, size: int) -> None:
            self.size = size

    def first(table: Table) -> int:
        make = table.make
        make(4)
        return table.size

    assert _found(Net(Table(), first)) == [4, 4]


@pytest.mark.parametrize("caches", [functools.cache, functools.lru_cache])
def test_a_result_from_before_a_recording_stays_in_its_cache(caches: Any) -> None:
    """A cache that was emptied would begin its counts again."""
    calls: list[int] = []

    @caches
    def counter(number: int) -> list[int]:
        calls.append(number)
        return [0]

    def first(number: int) -> int:
        for one in (1, number):
            counter(one)[0] += 1
        return counter(1)[0]

    before = counter(1)
    assert _found(Net(2, first)) == [1, 2]
    assert counter(1) is before
    assert calls == [1, 2]


# --- what cannot be put back


def _hash(held: Any) -> int:
    held.update(b"1")
    return held.digest()[0]


REFUSED = {
    "pop": (lambda held: held.pop(), lambda: {1, 2, 3}, r"calls pop\(\) of a set, whose order"),
    "finditer": (next, lambda: re.finditer("a", "aaaa"), "advances an iterator, callable_iterator"),
    "a queue": (
        lambda held: held.get(timeout=9),
        queue.SimpleQueue,
        "item out of a queue.SimpleQueue",
    ),
    "a hash": (_hash, hashlib.sha256, "updates a hash, which cannot be put back"),
    "a queue's iterator": (
        lambda held: next(held),
        lambda: iter(queue.SimpleQueue().get, None),
        "advances an iterator, callable_iterator",
    ),
    "a reader": (
        next,
        lambda: csv.reader(["1", "2"]),
        r"advances an iterator, reader \('\w+' of \w+\), which",
    ),
    "a cursor": (
        next,
        lambda: sqlite3.connect(":memory:").execute("select 1"),
        r"advances an iterator, Cursor \('\w+' of \w+\), which",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_neither_copied_nor_put_back_when_a_forward_uses_it_is_refused(what: str) -> None:
    """The first step went on from where the recording had come to; the error names the line."""
    first, make, message = REFUSED[what]
    held = make()
    if what == "a queue":
        held.put(1)
    with pytest.raises(RecordingError, match=rf"{message}.*left_behind\.py"):
        _found(Net(held, lambda held: first(held)))


def _pops_its_own(held: set[int]) -> int:
    mine = set(held)
    mine.pop()
    return len(mine)


def _updates_copy(held: Any) -> int:
    mine = held.copy()
    mine.update(b"1")
    return mine.digest()[0]


class _Count(ctypes.Structure):
    _fields_: ClassVar = [("n", ctypes.c_int)]


class _Counts:
    n = 0


def _counts_up(held: Any) -> int:
    held.n += 1
    return int(held.n)


def _counts_in_view(held: memoryview) -> int:
    held[0] += 1
    return held[0]


COUNTED = {
    "a structure of C": (_counts_up, lambda: _Count(0)),
    "a view of bytes": (_counts_in_view, lambda: memoryview(bytearray(2))),
    "an object behind a weak reference": (lambda held: _counts_up(held()), None),
}


@pytest.mark.parametrize("what", COUNTED)
def test_a_count_in_such_an_object_is_as_before_a_recording(what: str) -> None:
    """The first step went on from where the recording had come to."""
    first, make = COUNTED[what]
    kept = _Counts()
    held = weakref.ref(kept) if make is None else make()
    assert _found(Net(held, first)) == [1, 2]


def test_a_reader_that_the_forward_leaves_alone_is_fine() -> None:
    """Python can neither copy it nor make an empty one, and the error blamed the batch."""
    assert _found(Net(csv.reader(["1"]), lambda held: 7)) == [7, 7]


NOT_REFUSED = {
    "a set of the forward's own": (_pops_its_own, {1, 2, 3}, 2),
    "the only member of a set": (lambda held: (held.add(7), held.pop())[1], set[int](), 7),
    "a copy of a hash": (_updates_copy, hashlib.sha256(), hashlib.sha256(b"1").digest()[0]),
    "a queue that is asked": (lambda held: held.qsize(), queue.SimpleQueue(), 0),
}


@pytest.mark.parametrize("what", NOT_REFUSED)
def test_such_an_object_when_a_forward_leaves_it_as_it_was_is_fine(what: str) -> None:
    first, held, expected = NOT_REFUSED[what]
    assert _found(Net(held, first)) == [expected] * 2


# --- seeds


@pytest.mark.parametrize("is_generator", [False, True])
def test_seeds_when_a_forward_spawns_from_them_are_as_before_a_recording(
    is_generator: bool,
) -> None:
    """The first step drew what the second micro-batch draws."""
    numpy = pytest.importorskip("numpy")

    def make() -> Any:
        return numpy.random.default_rng(3) if is_generator else numpy.random.SeedSequence(3)

    def first(seeds: Any) -> float:
        (spawned,) = seeds.spawn(1)
        return float(numpy.random.default_rng(spawned).random())

    plain = make()
    assert _found(Net(make(), first)) == [first(plain), first(plain)]


# --- classes of objects


class One:
    number = 1


class Other:
    number = 2


def _turns(held: Any) -> None:
    held.__class__ = Other if held.__class__ is One else One


def _replaces(held: Any) -> None:
    held.__dict__ = {"number": 3}


@pytest.mark.parametrize("sets", [_turns, _replaces])
def test_an_object_when_one_stage_replaces_all_of_it_and_another_reads_it_is_refused(
    sets: Callable[[Any], None],
) -> None:
    """Which micro-batch found which class depended on timing."""
    with pytest.raises(StateError, match=r"changes an One on hops \[0\].*reads it on hops .*1\]"):
        _found(Net(One(), sets, lambda held: held.number))


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x) * 2
        self.__class__ = Triples
        return found


class Triples(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def test_a_module_when_the_forward_gives_it_another_class_is_refused() -> None:
    """Each micro-batch called the forward of before."""
    net = nn.Sequential(Doubles(4, 4), nn.Linear(4, 4))
    with pytest.raises(RecordingError, match=r"got '0', which the forward makes Triples \(.*:\d+"):
        bp.record(net, torch.zeros(2, 4))
    assert type(net[0]) is Doubles


# --- what a library has


@pytest.fixture
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("_path")
def test_what_a_forward_sets_in_a_library_when_it_fails_is_put_back() -> None:
    def first(paths: list[str]) -> None:
        F.blockpipe_flag = True
        sys.path.append("here")
        raise ValueError("no")

    before, relu = [*sys.path], F.relu
    with pytest.raises(RecordingError, match="no"):
        bp.record(Net(None, first), torch.zeros(2, 4))
    assert not hasattr(F, "blockpipe_flag")
    assert sys.path == before
    assert F.relu is relu


def test_a_function_of_a_library_when_the_forward_replaces_it_is_as_before() -> None:
    before = F.hardshrink

    def first(_: object) -> None:
        F.hardshrink = F.softshrink

    bp.record(Net(None, first), torch.zeros(2, 4))
    assert F.hardshrink is before


def test_an_object_and_an_array_of_a_library_when_a_forward_changes_them_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpy = pytest.importorskip("numpy")
    for name, value in {"object": One(), "table": {"count": 0}, "array": numpy.zeros(2)}.items():
        monkeypatch.setattr(F, f"blockpipe_{name}", value, raising=False)

    def first(_: object) -> None:
        F.blockpipe_object.number += 1
        table = F.blockpipe_table
        table["count"] += 1
        F.blockpipe_array[0] += 1

    bp.record(Net(None, first), torch.zeros(2, 4))
    assert vars(F.blockpipe_object) == {}
    assert F.blockpipe_table == {"count": 0}
    assert F.blockpipe_array.tolist() == [0, 0]


def test_a_value_of_a_library_when_two_stages_share_it_is_refused() -> None:
    drawn = random.Random(0)

    def first(_: object) -> None:
        nn.Linear.blockpipe_flag = drawn.random()

    def second(_: object) -> float:
        return nn.Linear.blockpipe_flag

    with pytest.raises(StateError, match=r"changes Linear.blockpipe_flag on hops \[0\] .*\[1\]"):
        _found(Net(None, first, second))


# --- modes around a step


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_when_a_step_begins_with_a_recording_counts_the_step_alone() -> None:
    with Counts() as mode:
        _found(Net(None, lambda held: None))
    assert mode.count == 4


def test_operations_when_a_step_begins_with_a_recording_are_counted_once() -> None:
    with FlopCounterMode(display=False) as counter:
        _found(Net(None, lambda held: None))
    assert counter.get_total_flops() == 2 * 2 * 4 * 4 * 4


class Rebinds(nn.Module):
    """The function of a checkpoint names what is set to the checkpoint's result, so that the graph
    keeps itself."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.first, self.second, self.apart = nn.Linear(4, 4), nn.Linear(4, 4), apart

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(lambda t: self.second(t).relu() + h, h, use_reentrant=False)
        if self.apart:
            g = h
            out = checkpoint(lambda t: torch.tanh(self.second(t) + g), h, use_reentrant=False)
            g = out
            return g
        return h


class RebindsInGlue(nn.Module):
    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.layer, self.last = Rebinds(apart=apart), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.layer.forward(x)
        with bp.Block(stage=1):
            return self.last(h)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("in_glue", [False, True])
def test_a_checkpoint_whose_function_names_its_result_is_not_left_behind(
    in_glue: bool, apart: bool
) -> None:
    if in_glue:
        net: nn.Module = RebindsInGlue(apart=apart)
        plain = copy.deepcopy(net)
    else:
        net = nn.Sequential(Rebinds(apart=apart), nn.Linear(4, 4))
        plain = copy.deepcopy(net)
        bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for _ in range(2):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, x, F.mse_loss, 4)
        assert_same_gradients(net, plain)
