"""Containers in containers, which code reads without a name of their own."""

import itertools
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import plain_step
from ..stage_devices import assert_close, stages


class Row(NamedTuple):
    """What a stage adds to, and a number."""

    items: list[float]
    number: int


class Own(dict[str, Any]):
    """A dictionary of one's own, as people write it for attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Nested(nn.Module):
    """The first stage adds to one list, and changes one dictionary; the second reads ``read``."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read
        self.table: dict[str, Any] = {"a": [1.0], "b": [1.0], "n": 3}
        self.rows: list[Any] = [self.table["a"], self.table["b"], 3]
        self.only, self.pair = [self.table["a"]], (self.table["a"], 3)
        self.named, self.own = Row(self.table["a"], 3), Own(a=self.table["a"])
        self.bound = partial(max, self.table["a"])
        self.outer = {"inner": {"a": self.table["a"], "b": self.table["b"]}}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * len(self.table["a"])
            self.table["a"].append(1.0)
        with bp.Block(stage=1):
            time.sleep(0.002)
            return self.b(h) * self.read(self)


def _loops(s: Any) -> float:
    total = 0.0
    for value in s.table.get("a", ()):
        total += value
    return total


def _unpacks(s: Any) -> float:
    return float(sum(len(rest) for _, *rest in s.only))


READS: list[Callable[[Any], float]] = [
    _loops,
    _unpacks,
    lambda s: float(len(s.table.get("a", ()))),
    lambda s: sum(s.table.get("a") or [0.0]),
    lambda s: float(len(s.outer.get("inner", {}).get("a", ()))),
    lambda s: float(len(s.table.__getitem__("a"))),
    lambda s: float(len(next(iter(s.table.values())))),
    lambda s: float(len(next(reversed(s.only)))),
    lambda s: float(len(vars(s).get("table").get("a"))),
    lambda s: float(len(operator.attrgetter("table")(s).get("a"))),
    lambda s: float(len(operator.itemgetter("a")(s.table))),
    lambda s: float(max(map(len, s.outer["inner"].values()))),
    lambda s: float(max(map(len, s.pair[:1]))),
    lambda s: float(len(list(itertools.chain.from_iterable(s.only)))),
    lambda s: float(len(s.own.get("a")) + len(next(iter(s.own.values())))),
    lambda s: float(len((s.table | {})["a"]) + len((s.only + s.rows)[0])),
    lambda s: float(len(s.named._replace(number=4).items) + len(s.named._asdict()["items"])),
    lambda s: float(len(s.bound.args[0])),
    lambda s: float(len(s.table.copy().popitem()) + len(str(s.pair))),
    lambda s: float(sum(map(sum, zip(*s.only, strict=True)))),
    lambda s: 2.0 if s.only == [[1.0] * 3] else 1.0,
    lambda s: 2.0 if [1.0] * 3 in s.only else 1.0,
    lambda s: 1.0 + s.only.count([1.0] * 3),
    lambda s: 2.0 if s.outer["inner"] == {"a": [1.0] * 3} else 1.0,
]


@pytest.mark.parametrize("read", READS)
def test_a_container_without_a_name_is_read(read: Callable[[Any], float]) -> None:
    """The other micro-batches' items were counted, without a word."""
    pipe = bp.Pipeline(Nested(read), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes a list on hops \[0\].*and reads it"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


APART: list[Callable[[Any], float]] = [
    lambda s: float(len(s.table["b"])),
    lambda s: float(len(s.table.get("b"))),
    lambda s: sum(s.rows[1]),
    lambda s: float(s.rows[2]),
    lambda s: float(len(s.rows) + len(s.table)),
    lambda s: 2.0 if s.table["n"] == 3 else 1.0,
    lambda s: 2.0 if s.table.get("n") == 3 and s.rows[2] == 3 and s.pair[1] == 3 else 1.0,
    lambda s: 2.0 if "a" in s.table and "z" not in s.table else 1.0,
    lambda s: float(len(s.outer.get("inner").get("b"))),
    lambda s: float(len(list(s.rows)[1]) + len(list(s.table)) + s.rows.copy().pop()),
    lambda s: float(sum(1 for _ in s.table.keys())),  # noqa: SIM118
]


@pytest.mark.parametrize("read", APART)
def test_what_is_beside_a_container_that_changes_is_apart(read: Callable[[Any], float]) -> None:
    """The remedy is a list for each stage, in one dictionary: its length was refused."""
    net, x, y = Nested(read), torch.randn(8, 4), torch.randn(8, 4)
    plain = Nested(read)
    plain.load_state_dict(net.state_dict())
    with bp.Pipeline(net, devices=stages(2), chunks=4) as pipe:
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert net.table == plain.table


@pytest.mark.parametrize("how", ["get", "next"])
def test_a_hook_reads_a_container_without_a_name(how: str) -> None:
    """Only the source of a hook on a tensor is looked at."""

    def weighed(net: Any, grad: Tensor) -> Tensor:
        return grad * len(net.table.get("a", ()))

    def weighed_by_first(net: Any, grad: Tensor) -> Tensor:
        return grad * len(next(iter(net.table.values())))

    class Net(Nested):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                self.table["a"].append(1.0)
            with bp.Block(stage=1):
                out: Tensor = self.b(h)
                out.register_hook(partial(weighed if how == "get" else weighed_by_first, self))
                return out

    pipe = bp.Pipeline(Net(_loops), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="list"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)
