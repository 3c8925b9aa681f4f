"""Code that the recorded micro-batch did not run, or not for each member of a loop: by whatever
name or expression it reaches an object that another stage reads."""

import collections
import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages

X = torch.rand(8, 4)


class Box:
    """An object of the user's, with a value that data set."""

    def __init__(self) -> None:
        self.value = 1.0

    def put(self, value: float) -> None:
        self.value = value

    def itself(self) -> "Box":
        return self


class Each:
    """Gives one box, as an iterable of the user's does."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def __iter__(self) -> Iterator[Box]:
        yield self.box


Pair = collections.namedtuple("Pair", "box")


class Net(nn.Module):
    """Its second stage sets a value in some batches, and the first one reads it in all."""

    def __init__(self, rare: Callable[..., None]) -> None:
        super().__init__()
        self.a, self.b, self.rare, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), rare, 0
        self.box, self.other = Box(), Box()
        self.boxes, self.named, self.pair = [self.box], {"a": self.box}, Pair(self.box)
        self.nested, self.weak = {"a": [{"b": self.box}]}, weakref.ref(self.box)
        self.each, self.chain = Each(self.box), collections.ChainMap(self.named)

    def __iter__(self) -> Iterator[Box]:
        return iter(self.boxes)

    def all_boxes(self) -> Iterator[Box]:
        yield self.box

    def one(self) -> Box:
        return self.box

    @property
    def found(self) -> Box:
        return self.box

    def put_all(self, boxes: list[Box], value: float) -> None:
        for box in boxes:
            box.value = value

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.box.value
        with bp.Block(stage=1):
            h = self.b(h)
            self.calls += 1
            self.rare(self, h)
            return h


def _loop(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for box in net.boxes:
            box.value = float(net.calls)


def _pairs(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for _, (_, box) in enumerate(net.named.items()):
            box.value = float(net.calls)


def _nested(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for many in net.nested.values():
            for named in many:
                for box in named.values():
                    box.value = float(net.calls)


def _sorted(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for box in sorted(net.boxes, key=id):
            box.value = float(net.calls)


def _generated(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for box in net.all_boxes():
            box.value = float(net.calls)


def _iterable(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for box in itertools.chain(net.each, net):
            box.value = float(net.calls)


def _with(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        with contextlib.nullcontext(net.box) as box:
            box.value = float(net.calls)


def _matched(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        match net:
            case Net(box=box):
                box.value = float(net.calls)


def _unpacked(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        (box,) = net.pair
        box.value = float(net.calls)


def _either(net: Net, h: Tensor) -> None:
    box = net.other
    if net.calls > 3:
        box = net.box
    box.value = float(net.calls)


def _inner(net: Net, h: Tensor) -> None:
    if net.calls > 3:

        def put(box: Box) -> None:
            box.value = float(net.calls)

        put(net.box)


def _partial(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        functools.partial(Box.put, net.box)(float(net.calls))


def _found(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        net.found.value = float(net.calls)


def _itself(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        net.one().itself().value = float(net.calls)


def _greatest(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        box = max(net.boxes, key=id)
        box.value = float(net.calls)


def _weak(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        weakref.ref(net.weak())().value = float(net.calls)  # type: ignore[union-attr]


def _chained(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        net.chain["a"].value = float(net.calls)


def _getter(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        box = operator.itemgetter(0)(net.boxes)
        setattr(box, "value", float(net.calls))  # noqa: B010 - a way that users take


def _helped(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        net.put_all(net.boxes, float(net.calls))


def _lambda(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        any(box.put(float(net.calls)) for box in net.boxes)  # type: ignore[func-returns-value]


def _starred(net: Net, h: Tensor) -> None:
    if net.calls > 3:
        for box in (*net.boxes, net.other):
            box.value = float(net.calls)


def _excepted(net: Net, h: Tensor) -> None:
    try:
        1 / (net.calls > 3)
        net.boxes[0].value = float(net.calls)
    except ZeroDivisionError:
        pass


def _caught(net: Net, h: Tensor) -> None:
    try:
        1 / (net.calls % 3)
    except ZeroDivisionError:
        net.box.value = 2.0 if net.calls > 3 else 3.0


RARE = [
    *(_loop, _pairs, _nested, _sorted, _generated, _iterable, _with, _matched, _unpacked, _either),
    *(_inner, _partial, _found, _itself, _greatest, _weak, _chained, _getter, _helped, _lambda),
    *(_excepted, _caught, _starred),
]


@pytest.mark.parametrize("rare", RARE)
def test_what_a_later_forward_sets_when_another_stage_reads_it_is_refused(
    rare: Callable[..., None],
):
    """Before the first step, and not in the first one that leaves another value behind: one that
    came back to its first value was not seen."""
    pipe = bp.Pipeline(Net(rare), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"attribute 'value' of a Box (on|was set)"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


class Mixes(nn.Module):
    """Its first stage sets the second one's normalized weight now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(4, 4), 0
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.calls += 1
            if self.calls % 6 == 0:
                with torch.no_grad():
                    self.mix.weight = torch.full((4, 4), self.calls / 100)
        with bp.Block(stage=1):
            return self.mix(h)


def test_a_parametrized_weight_when_a_later_forward_sets_it_elsewhere_is_refused():
    """Attack 45: torch writes to the tensors that it is computed from."""
    pipe = bp.Pipeline(Mixes(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes parameter 'mix\..*original0' on hops \[0\]"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
