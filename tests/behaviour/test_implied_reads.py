"""Values that no name in the code reads: Python's syntax calls a method, or unpacks the object."""

import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Plain:
    """It holds a number, and ways to itself."""

    def __init__(self) -> None:
        self.k = 1.0
        self.items, self.pair, self.table = [self], (self, 1), {"o": self}
        self.nest, self.none = ([self], 1), None

    @property
    def me(self) -> "Plain":
        return self

    @functools.cached_property
    def cached(self) -> "Plain":
        return self


class Iterated(Plain):
    def __iter__(self) -> Iterator[float]:
        yield self.k


class Counted(Plain):
    """What has a length is true or false by it."""

    def __len__(self) -> int:
        return int(self.k)


class Entered(Plain):
    def __enter__(self) -> float:
        return self.k

    def __exit__(self, *failure: object) -> None:
        pass


class Compared(Plain):
    def __lt__(self, other: float) -> bool:
        return self.k < other

    def __contains__(self, value: float) -> bool:
        return self.k > value


class Computed(Plain):
    def __add__(self, other: float) -> float:
        return self.k + other

    def __radd__(self, other: float) -> float:
        return self.k + other

    def __neg__(self) -> float:
        return -self.k

    def __index__(self) -> int:
        return int(self.k)

    def __getitem__(self, key: object) -> float:
        return self.k

    def __getattr__(self, name: str) -> float:
        if name == "asked":
            return self.k
        raise AttributeError(name)

    def __call__(self) -> float:
        return self.k


class Shown(Plain):
    def __str__(self) -> str:
        return str(self.k)

    def __format__(self, form: str) -> str:
        return str(self.k)


class Mapped(Plain):
    def keys(self) -> list[str]:
        return ["k"]

    def __getitem__(self, key: str) -> float:
        return self.k


class Matched(Plain):
    __match_args__ = ("k",)


class Awaited(Plain):
    def __await__(self) -> Iterator[None]:
        return self.k
        yield

    async def __aiter__(self) -> AsyncIterator[float]:
        yield self.k

    async def __aenter__(self) -> float:
        return self.k

    async def __aexit__(self, *failure: object) -> None:
        pass


@dataclasses.dataclass
class Held:
    k: float = 1.0


class Descriptor:
    def __get__(self, owner: "Described", kind: object) -> float:
        return owner.k


class Described(Plain):
    value = Descriptor()


def _ran(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value


def _for(o: Any) -> float:
    for value in o:
        return value
    return 0.0


def _unpacks(o: Any) -> float:
    (value,) = o
    return value


def _unpacks_list(o: Any) -> float:
    (inner,) = o.items
    return inner.k


def _unpacks_rest(o: Any) -> float:
    first, *_ = o.pair
    return first.k


def _unpacks_nest(o: Any) -> float:
    (inner,), _ = o.nest
    return inner.k


def _either(o: Any) -> float:
    inner = o.none or o
    return inner.k


def _chained(o: Any) -> float:
    one = other = o.me
    return one.k + other.k


def _with(o: Any) -> float:
    with o as value:
        return value


def _zips(o: Any) -> float:
    for inner, _ in zip(o.items, o.pair, strict=False):
        return inner.k
    return 0.0


def _matches(o: Any) -> float:
    match o:
        case Matched(value):
            return value
    return 0.0


def _matches_list(o: Any) -> float:
    match o.items:
        case [inner]:
            return inner.k
    return 0.0


def _matches_table(o: Any) -> float:
    match o.table:
        case {"o": inner}:
            return inner.k
    return 0.0


def _takes(o: Any) -> float:
    table = {"a": o}
    return table.pop("a").k


def _delegates(o: Any) -> float:
    def values() -> Iterator[float]:
        yield from o

    return next(values())


def _awaits(o: Any) -> float:
    async def value() -> float:
        return await o

    return _ran(value())


def _loops_later(o: Any) -> float:
    async def value() -> float:
        async for found in o:
            return found
        return 0.0

    return _ran(value())


def _enters_later(o: Any) -> float:
    async def value() -> float:
        async with o as found:
            return found

    return _ran(value())


def _returned(o: Any) -> float:
    def inner() -> Any:
        return o

    return inner().k


CASES: dict[str, tuple[type[Plain], Callable[[Any], Any]]] = {
    "for": (Iterated, _for),
    "unpack": (Iterated, _unpacks),
    "star": (Iterated, lambda o: [*o][0]),  # noqa: RUF015
    "star argument": (Iterated, lambda o: max(*o, 0.0)),
    "sum": (Iterated, lambda o: sum(o)),
    "yield from": (Iterated, _delegates),
    "len": (Counted, lambda o: len(o)),
    "if": (Counted, lambda o: 2.0 if o else 1.0),
    "not": (Counted, lambda o: float(not o)),
    "with": (Entered, _with),
    "less": (Compared, lambda o: 2.0 if o < 1.5 else 1.0),
    "in": (Compared, lambda o: 2.0 if 1.5 in o else 1.0),
    "add": (Computed, lambda o: o + 1.0),
    "add to": (Computed, lambda o: 1.0 + o),
    "negative": (Computed, lambda o: -o),
    "index": (Computed, lambda o: [1.0, 2.0, 3.0][o]),
    "entry": (Computed, lambda o: o[0:1]),
    "any attribute": (Computed, lambda o: o.asked),
    "call": (Computed, lambda o: o()),
    "text": (Shown, lambda o: float(str(o))),
    "f-string": (Shown, lambda o: float(f"{o}")),
    "percent": (Shown, lambda o: float("%s" % o)),  # noqa: UP031
    "double star": (Mapped, lambda o: dict(**o)["k"]),
    "double star, display": (Mapped, lambda o: {**o}["k"]),
    "match": (Matched, _matches),
    "await": (Awaited, _awaits),
    "async for": (Awaited, _loops_later),
    "async with": (Awaited, _enters_later),
    "descriptor": (Described, lambda o: o.value),
    "list": (Plain, _unpacks_list),
    "rest": (Plain, _unpacks_rest),
    "nest": (Plain, _unpacks_nest),
    "or": (Plain, _either),
    "or, at once": (Plain, lambda o: (o.none or o).k),
    "conditional": (Plain, lambda o: (o if o.items else None).k),
    "chain": (Plain, _chained),
    "zip": (Plain, _zips),
    "match list": (Plain, _matches_list),
    "match table": (Plain, _matches_table),
    "pop": (Plain, _takes),
    "get": (Plain, lambda o: o.table.get("o").k),
    "values": (Plain, lambda o: [*o.table.values()][0].k),  # noqa: RUF015
    "display": (Plain, lambda o: {**o.table}["o"].k),
    "next": (Plain, lambda o: next(iter(o.items)).k),
    "slice": (Plain, lambda o: o.items[-1:][0].k),
    "walrus": (Plain, lambda o: (inner := o).k),  # noqa: F841
    "map": (Plain, lambda o: [*map(lambda n: n.k, o.items)][0]),  # noqa: C417, RUF015
    "key": (Plain, lambda o: sorted(o.items, key=lambda n: n.k)[0].k),
    "default": (Plain, lambda o: (lambda n=o: n.k)()),
    "arguments": (Plain, lambda o: (lambda n: n.k)(*o.items)),
    "cached property": (Plain, lambda o: o.cached.k),
    "returned": (Plain, _returned),
    # The text of a dataclass is written by code without source.
    "fields": (Held, lambda o: len(str(o))),
    "fields in an f-string": (Held, lambda o: len(f"{o}")),
    "fields by percent": (Held, lambda o: len("%s" % o)),  # noqa: UP031
    "fields of one of several": (Held, lambda o: len("%s %s" % (1, o))),  # noqa: UP031
    "fields in a list": (Held, lambda o: len(str([o]))),
    "fields by format": (Held, lambda o: len("{!r}".format(o))),  # noqa: UP032
}


class Net(nn.Module):
    """Two layers on two stages, and an object."""

    def __init__(self, held: Any, read: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.held, self.read = nn.Linear(4, 4), nn.Linear(4, 4), held, read

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            if self.read is None:
                self.held.k = h.detach().abs().max().item() + time.perf_counter()
            else:
                h = h * float(self.read(self.held))
        with bp.Block(stage=1):
            h = self.b(h)
            if self.read is not None:
                self.held.k = h.detach().abs().max().item() + 1.0
            return h


X = torch.randn(8, 4)


# What ``pop`` takes is out of the container by then.
@pytest.mark.parametrize("how", [how for how in CASES if how != "pop"])
def test_a_forward_that_reads_what_a_later_stage_sets_is_refused(how: str) -> None:
    kind, read = CASES[how]
    pipe = bp.Pipeline(Net(kind(), read), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"the forward changes .* on hops \[1\].*reads it on hops"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize("how", CASES)
def test_a_loss_that_reads_what_an_earlier_stage_sets_is_refused(how: str) -> None:
    """No loss runs in a recording: its source, and the classes of its objects, say what it
    reads."""
    kind, read = CASES[how]
    net = Net(kind())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * float(read(net.held))

    with pytest.raises(StateError, match=r"the forward changes .* on hops \[0\].*reads it on hops"):
        pipe.forward_backward(X, target=X, loss_fn=loss)


class Scaled(nn.Module):
    """A loss that reads a number of its own, of the same name, and other attributes."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.k, self.nets = 2.0, [net]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        (net,) = self.nets
        weights = [p.abs().mean() for p in net.parameters()]
        return mse_loss(output, target) * self.k + 0 * sum(weights)


def test_a_loss_that_reads_other_values_of_such_an_object_is_fine() -> None:
    net = Net(Plain())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    assert pipe.forward_backward(X, target=X, loss_fn=Scaled(net)).loss > 0
