"""Which part of a value is compared between steps."""

import contextvars
import datetime
import fractions
import functools
import gc
import math
import operator
import pathlib
import random
import re
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.preparation.watched.contents import Contents
from blockpipe.preparation.watched.seen import content, is_same, one_look, seen

from ...stage_devices import stages
from .test_watched_values import Gated

CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("of these tests", default=0)


class Says:
    """An object of the user's with an answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def ask(self) -> Any:
        return self.answer


class Slotted:
    """An object whose slot has no value at first."""

    __slots__ = ("answer",)


def _says(answer: Any) -> Callable[[], Any]:
    return lambda: answer


def _defaults(answer: Any = False) -> Any:
    return answer


def _set_by_data(net: nn.Module, name: str, tensor: Tensor) -> None:
    getattr(net, name).data = tensor


# By name: the value before, the value after, and what the forward asks.
VALUES: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "dtype": (torch.float32, torch.float64, lambda v: v is torch.float64),
    "device": (torch.device("cpu"), torch.device("meta"), lambda v: v.type == "meta"),
    "slice": (slice(0, 1), slice(0, 2), lambda v: v.stop > 1),
    "range": (range(1), range(2), lambda v: len(v) > 1),
    "complex": (0j, 1j, lambda v: v == 1j),
    "true": (1, True, lambda v: v is True),
    "in a tuple": ((1,), (True,), lambda v: v[0] is True),
    "size": (torch.Size([1]), torch.Size([2]), lambda v: v[0] == 2),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(2, 3), lambda v: v > 0.6),
    "date": (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), lambda v: v.year > 2020),
    "path": (pathlib.Path("a"), pathlib.Path("b"), lambda v: v.name == "b"),
    "pattern": (re.compile("a"), re.compile("b"), lambda v: v.match("b")),
    "frozen set": (frozenset(), frozenset([1]), lambda v: 1 in v),
    "set": ({1}, {2}, lambda v: 2 in v),
    "shorter list": ([0, 1], [0], lambda v: len(v) == 1),
    "nested": ({"a": [0]}, {"a": [1]}, lambda v: v["a"][0]),
    "proxy": (types.MappingProxyType({"a": 0}), types.MappingProxyType({"a": 1}), lambda v: v["a"]),
    "module": (math, random, lambda v: v is random),
    "partial": (functools.partial(max, 0), functools.partial(max, 1), lambda v: v(0)),
    "getter": (operator.itemgetter(0), operator.itemgetter(1), lambda v: v((0, 1))),
    "closure": (_says(False), _says(True), lambda v: v()),
    "method": (Says(False).ask, Says(True).ask, lambda v: v()),
    "object": (Says(False), Says(True), lambda v: v.ask()),
    "array": (np.zeros(1), np.zeros(2), lambda v: len(v) == 2),
    "shape": (torch.zeros(1), torch.zeros(2), lambda v: len(v) == 2),
    "sparse": (torch.zeros(2), torch.zeros(2).to_sparse(), lambda v: v.is_sparse),
    "tensor": (None, torch.zeros(1), lambda v: v is not None),
}


def _gate(before: Any, after: Any, asks: Callable[[Any], Any]) -> Any:
    return lambda net, step: setattr(net, "value", after if step > 1 else before), lambda net: asks(
        net.value
    )


PLACES = {
    "buffer": (
        lambda n, s: setattr(n, "given", torch.zeros(1) if s > 1 else None),
        lambda n: n.given is not None,
    ),
    "buffer of another type": (
        lambda n, s: setattr(n, "given", torch.zeros(1, dtype=torch.float64 if s > 1 else None)),
        lambda n: n.given.dtype is torch.float64,
    ),
    "parameter": (
        lambda n, s: s == 2 and _set_by_data(n, "extra", torch.zeros(2)),
        lambda n: len(n.extra) == 2,
    ),
    "slot": (
        lambda n, s: s > 1 and setattr(n.slotted, "answer", 1),
        _has_answer := (lambda n: hasattr(n.slotted, "answer")),
    ),
    "defaults": (
        lambda n, s: setattr(_defaults, "__defaults__", (s > 1,)),
        lambda n: _defaults(),
    ),
    "entry by default": (lambda n, s: s > 1 and n.table.update(a=1), lambda n: n.table["a"]),
    "context": (lambda n, s: CONTEXT.set(s // 2), lambda n: CONTEXT.get()),
    "precision": (
        lambda n, s: torch.set_float32_matmul_precision("high" if s > 1 else "highest"),
        lambda n: torch.get_float32_matmul_precision() == "high",
    ),
}


class Holding(Gated):
    """Has places of several kinds."""

    def __init__(self, is_on: Any) -> None:
        super().__init__(is_on)
        self.register_buffer("given", None)
        self.extra = nn.Parameter(torch.zeros(1))
        self.slotted, self.table = Slotted(), defaultdict(int)


@pytest.fixture
def _as_it_was():
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    _defaults.__defaults__ = (False,)
    CONTEXT.set(0)


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("name", [*VALUES, *PLACES])
def test_what_is_set_between_steps_is_noticed_whatever_it_is(name: str):
    """It was not, where it was no number, text or enum: the step took the other branch, unseen."""
    set_it, is_on = PLACES[name] if name in PLACES else _gate(*VALUES[name])
    net = Holding(is_on)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for step in range(2):
        set_it(net, step)
        pipe.forward_backward(x, loss_fn=torch.sum)
    set_it(net, 2)
    with pytest.raises(StateError, match=r"the forward changes a list, and sets it on hops"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def test_what_is_in_a_container_that_came_later_counts():
    """An equal one was no reason to record; what is set in it is one."""
    net = Holding(lambda net: net.value["on"])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x, net.value = torch.randn(8, 4), {"on": False, "of": torch.zeros(1)}
    for _ in range(3):
        pipe.forward_backward(x, loss_fn=torch.sum)
        net.value = {"on": False, "of": torch.zeros(1)}
    pipe.forward_backward(x, loss_fn=torch.sum)
    net.value["on"] = True
    with pytest.raises(StateError, match=r"the forward changes a list, and sets it on hops"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def test_a_model_that_was_replaced_is_not_kept():
    """A teacher in a list, which hides its parameters, as each epoch makes it anew."""
    net = Holding(lambda net: False)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    x, before = torch.randn(4, 4), list[weakref.ref[nn.Module]]()
    for _ in range(4):
        net.value = [nn.Linear(4, 4)]
        before.append(weakref.ref(net.value[0]))
        pipe.forward_backward(x, loss_fn=torch.sum)
    gc.collect()
    assert [one() is None for one in before] == [True, True, True, False]


@pytest.mark.parametrize("name", VALUES)
def test_what_is_seen_of_a_value_is_the_same_until_it_changes(name: str):
    before, after, _ = VALUES[name]
    assert is_same(seen(before), seen(before))
    assert not is_same(seen(before), seen(after))


def test_what_a_forward_keeps_is_no_reason_to_record():
    """Results of other shapes, caches, and what it makes anew."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last: Any = None
            self.seen, self.table = [], {}
            self.register_buffer("bank", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                self.last, self.seen = h.detach(), [h.detach()]
                self.table = {"shape": x.shape}
                self.bank = torch.cat([self.bank, h.detach().mean(0, keepdim=True)])
            with bp.Block(stage=1):
                return self.b(h)

    net = Keeps()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    recordings = {}
    for size in (8, 8, 8, 6, 8, 4, 12, 10, 8):
        pipe.forward_backward(torch.randn(size, 4), loss_fn=torch.sum)
        recordings[id(pipe.recording)] = pipe.recording
    assert len(recordings) == 1


def test_an_object_is_looked_into_once_in_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of all parameters that lead to one object made a look take seconds."""
    looked, of = [], Contents.of
    monkeypatch.setattr(Contents, "of", lambda self, value: looked.append(value) or of(self, value))
    table = {"a": 1}
    with one_look():
        first = content(table)
        assert content(table) is first
        assert sum(one is table for one in looked) == 1
    table["a"] = 2
    with one_look():
        assert content(table) != first
    table["a"] = 3
    assert content(table) != first
