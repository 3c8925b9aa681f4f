"""What a forward advances outside of the model: the first step begins where the user left it."""

import array
import contextvars
import copy
import ctypes
import decimal
import functools
import itertools
import logging
import mmap
import multiprocessing
import os
import random
import sys
import threading
import weakref
from abc import ABC
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Normal, TransformedDistribution
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError

from ..stage_devices import stages

VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
OTHER = contextvars.ContextVar("OTHER", default=0)


class Net(nn.Module):
    """Counts on stage 0, by what a test says, and keeps the counts."""

    def __init__(self, count: Callable[[Any], int], held: object = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count, self.held = count, held
        self.counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            number = self.count(self.held)
            self.counts.append(number)
            h = self.a(x) * number
        with bp.Block(stage=1):
            return self.b(h)


def _counts(net: Net, steps: int = 2, **options: object) -> list[int]:
    """What the forwards of so many steps have counted."""
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, **options)
    with torch.no_grad():
        for _ in range(steps):
            pipe(torch.randn(4, 4))
    return net.counts


def _in_environment(_: object) -> int:
    os.environ["BLOCKPIPE_COUNT"] = str(int(os.environ.get("BLOCKPIPE_COUNT", "0")) + 1)
    return int(os.environ["BLOCKPIPE_COUNT"])


def _in_first(numbers: Any) -> int:
    numbers[0] += 1
    return int(numbers[0])


def _in_number(number: ctypes.c_int) -> int:
    number.value += 1
    return number.value


def _in_recursion_limit(before: int) -> int:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return sys.getrecursionlimit() - before


def _in_precision(before: int) -> int:
    decimal.getcontext().prec += 1
    return decimal.getcontext().prec - before


def _in_iterator(numbers: Iterator[int]) -> int:
    return next(numbers)


def _in_library(_: object) -> int:
    torch.blockpipe_count = getattr(torch, "blockpipe_count", 0) + 1
    return torch.blockpipe_count


def _in_librarys_class(_: object) -> int:
    setattr(nn.Linear, "blockpipe_count", getattr(nn.Linear, "blockpipe_count", 0) + 1)  # noqa: B010
    return nn.Linear.blockpipe_count


def _in_librarys_list(before: int) -> int:
    paths = sys.path
    paths.append("")
    return len(sys.path) - before


def _in_imported_module(_: object) -> int:
    from . import restored_objects as objects

    objects.count += 1
    return objects.count


def _in_imported_list(_: object) -> int:
    from .restored_objects import numbers

    numbers[0] += 1
    return numbers[0]


class _First:
    number = 1


class _Second(_First):
    number = 2


class _Third(_First):
    number = 3


class _Fourth(_First):
    number = 4


class _Fifth(_First):
    number = 5


def _in_class(one: Any) -> int:
    number: int = one.number
    one.__class__ = (_First, _Second, _Third, _Fourth, _Fifth)[number]
    return number


def _in_dictionary(one: Any) -> int:
    one.__dict__ = {"count": vars(one).get("count", 0) + 1}
    return one.count


def _in_handlers(logger: logging.Logger) -> int:
    logger.addHandler(logging.NullHandler())
    return len(logger.handlers)


def _abstract() -> type:
    class Kind(ABC):  # noqa: B024 - classes are registered with it
        pass

    return Kind


def _in_registry(kind: Any) -> int:
    found = [one for one in (_First, _Second, _Third, _Fourth) if not issubclass(one, kind)]
    kind.register(found[-1])
    return 5 - len(found)


def _in_drawing(draw: Callable[[], float]) -> int:
    drawn = random.Random(0)
    return [drawn.random() for _ in range(5)].index(draw()) + 1


class _Data(Dataset[int]):
    """It counts how often it was asked."""

    count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.count

    def __len__(self) -> int:
        return 1


class _Scales(AffineTransform):
    count = 0

    def _call(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def _in_distribution(held: Any) -> int:
    return int(held.transforms[0](torch.ones(())))


def _in_key(held: Any) -> int:
    key = next(iter(held))
    key.number += 1
    return int(key.number) - 1


_PROXIED = _First()  # which nothing in the forward's reach holds


def _by_proxy(held: Any) -> int:
    held.number += 1
    return int(held.number) - 1


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    limit, precision = sys.getrecursionlimit(), decimal.getcontext().prec
    monkeypatch.setenv("BLOCKPIPE_COUNT", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "blockpipe_count", 0, raising=False)
    monkeypatch.setattr(nn.Linear, "blockpipe_count", 0, raising=False)
    monkeypatch.setattr(f"{__package__}.restored_objects.count", 0)
    monkeypatch.setattr(f"{__package__}.restored_objects.numbers", [0])
    yield
    sys.setrecursionlimit(limit)
    decimal.getcontext().prec = precision


COUNTS = {
    "an environment variable": (_in_environment, lambda: None),
    "mapped memory": (_in_first, lambda: mmap.mmap(-1, 8)),
    "an array of C": (_in_first, lambda: (ctypes.c_long * 2)()),
    "arrays of C": (lambda held: _in_first(held[1]), lambda: ((ctypes.c_double * 2) * 2)()),
    "a number of C": (_in_number, lambda: ctypes.c_int(0)),
    "an array": (_in_first, lambda: array.array("i", [0])),
    "the recursion limit": (_in_recursion_limit, sys.getrecursionlimit),
    "the precision": (_in_precision, lambda: decimal.getcontext().prec),
    "an iterator": (_in_iterator, lambda: itertools.count(1)),
    "a library's module": (_in_library, lambda: None),
    "a library's class": (_in_librarys_class, lambda: None),
    "a library's list": (_in_librarys_list, lambda: len(sys.path)),
    "a module that is imported there": (_in_imported_module, lambda: None),
    "a list that is imported there": (_in_imported_list, lambda: None),
    "the class of an object": (_in_class, _First),
    "the dictionary of an object": (_in_dictionary, _First),
    "handlers of a logger": (_in_handlers, lambda: logging.Logger("counting")),
    "an abstract class": (_in_registry, _abstract),
    "a method of a generator": (_in_drawing, lambda: random.Random(0).random),
    "shared memory": (_in_number, lambda: multiprocessing.Value("i", 0)),
    "a shared array": (_in_first, lambda: multiprocessing.Array("i", 1)),
    "a part of a data set": (lambda held: held[0], lambda: Subset(_Data(), [0])),
    "a loader's data set": (lambda held: held.dataset[0], lambda: DataLoader(_Data())),
    "several data sets": (lambda held: held[0], lambda: ConcatDataset([_Data()])),
    "a distribution's transform": (
        _in_distribution,
        lambda: TransformedDistribution(Normal(0.0, 1.0), [_Scales(0.0, 1.0)]),
    ),
    "a key of a dictionary": (_in_key, lambda: {_First(): 1}),
    "an object behind a proxy": (_by_proxy, lambda: weakref.proxy(_PROXIED)),
}


@pytest.mark.every
@pytest.mark.parametrize("what", COUNTS)
def test_a_count_outside_of_the_model_when_it_is_recorded_is_put_back(what: str) -> None:
    """The first step counted from where the recording had come to."""
    count, make = COUNTS[what]
    assert _counts(Net(count, make())) == [1, 2, 3, 4]


def test_an_event_when_it_is_recorded_is_left_as_another_thread_has_set_it() -> None:
    """It was cleared, and the first step waited for ever."""
    event = threading.Event()
    bp.record(Net(lambda event: event.set() or 1, event), torch.zeros(2, 4))
    assert event.is_set()


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_the_position_in_a_file_when_it_is_recorded_is_put_back(tmp_path: Path, mode: str) -> None:
    """The first step read the second line first."""
    (tmp_path / "lines").write_text("1\n2\n3\n4\n")
    with (tmp_path / "lines").open(mode) as file:
        assert _counts(Net(lambda file: int(file.readline()), file)) == [1, 2, 3, 4]


def test_an_environment_variable_that_the_forward_adds_when_it_is_recorded_goes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BLOCKPIPE_COUNT")
    bp.record(Net(_in_environment), torch.zeros(2, 4))
    assert "BLOCKPIPE_COUNT" not in os.environ


# --- what cannot be put back


def test_a_loaders_iterator_when_a_forward_advances_it_is_refused() -> None:
    """It stayed behind by one batch, and the first step began with the second."""
    loader = iter(DataLoader([torch.ones(()), torch.zeros(())]))
    with pytest.raises(RecordingError, match=r"advances an iterator, _SingleProcess.*objects\.py"):
        _counts(Net(lambda loader: int(next(loader)), loader))
    assert int(next(loader)) == 1


def test_a_cache_when_a_forward_asks_how_often_it_was_used_is_refused() -> None:
    @functools.lru_cache
    def cached() -> int:
        return 1

    def hits(_: object) -> int:
        cached()
        return cached.cache_info().hits

    with pytest.raises(RecordingError, match=r"how often it was used.*objects\.py:\d+; count in"):
        _counts(Net(hits))


# --- context variables


def _in_variable(_: object) -> int:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def _for_a_while(_: object) -> int:
    outer = OTHER.get()
    token = OTHER.set(outer + 1)
    number = OTHER.get()
    OTHER.reset(token)
    return number


def test_a_context_variable_when_it_is_recorded_is_put_back() -> None:
    bp.record(Net(_in_variable), torch.zeros(2, 4))
    assert VARIABLE.get() == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_context_variable_when_forwards_count_in_it_is_refused(schedule: str) -> None:
    """Each micro-batch has a context of its own, so that each counted from the same number."""
    with pytest.raises(
        StateError,
        match=r"changes a ContextVar on hops \[0\] \(.*objects\.py:\d+\), and reads it on hops "
        r"\[0\] .*count in an attribute of the model",
    ):
        _counts(Net(_in_variable), schedule=schedule)


def test_a_context_variable_when_micro_batches_come_one_by_one_counts() -> None:
    def run() -> list[int]:
        return _counts(Net(_in_variable), schedule="sequential")

    assert contextvars.copy_context().run(run) == [1, 2, 3, 4]


class SetsVariable(Net):
    """Each stage has a value of its own there for a while; the last one that is left is data's."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            token = OTHER.set(2)
            h = self.a(x) * OTHER.get()
            OTHER.reset(token)
            VARIABLE.set(int(x[0, 0]))
        with bp.Block(stage=1):
            token = OTHER.set(3)
            self.counts.append(VARIABLE.get())
            h = self.b(h) * OTHER.get()
            OTHER.reset(token)
        return h


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_a_context_variable_that_forwards_set_is_each_micro_batchs_own(schedule: str) -> None:
    """It was refused, though nothing mixes; and after the step it had lost what they had set."""
    net, x = SetsVariable(_in_first), torch.arange(16.0).reshape(4, 4)
    expected = copy.deepcopy(net)(x)

    def run() -> int:
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        torch.testing.assert_close(pipe(x.to(stages(2)[0])).cpu(), expected)
        return VARIABLE.get()

    assert contextvars.copy_context().run(run) == 12
    assert sorted(net.counts) == [0, 4, 8, 12]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_context_variable_when_a_forward_resets_it_is_fine(schedule: str) -> None:
    assert _counts(Net(_for_a_while), schedule=schedule) == [1, 1, 1, 1]


# --- two stages


class Both(Net):
    """Counts on both stages."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.count(self.held)
        with bp.Block(stage=1):
            return self.b(h) * self.count(self.held)


@pytest.mark.every
@pytest.mark.parametrize("what", ["mapped memory", "an array of C", "a number of C"])
def test_a_count_outside_of_the_model_when_two_stages_count_is_refused(what: str) -> None:
    """Which micro-batch found which number depended on timing."""
    count, make = COUNTS[what]
    with pytest.raises(StateError, match=r"the forward changes .* on hops \[0, 1\]"):
        _counts(Both(count, make()))


def test_a_file_when_two_stages_read_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n" * 20)
    with (tmp_path / "lines").open() as file:
        with pytest.raises(StateError, match=r"changes a TextIOWrapper on hops \[0, 1\]"):
            _counts(Both(lambda file: int(file.readline()), file))
