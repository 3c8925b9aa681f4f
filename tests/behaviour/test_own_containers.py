"""Containers of the user's classes, whose methods have effects: nobody calls them but the user's code."""

import copy
import weakref
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import stages


class Recent(OrderedDict[int, float]):
    """The recipe of Python's documentation: what is read comes last, and the first goes."""

    def __getitem__(self, key: int) -> float:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key: int, value: float) -> None:
        super().__setitem__(key, value)
        if len(self) > 3:
            del self[next(iter(self))]


class Counting(dict[int, float]):
    """Counts in all that reads it."""

    reads = 0

    def __getitem__(self, key: int) -> float:
        self.reads += 1
        return super().__getitem__(key)

    def __len__(self) -> int:
        self.reads += 1
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self.reads += 1
        return super().__contains__(key)


class Filling(dict[int, float]):
    """Has an entry for each key that is asked for."""

    def __missing__(self, key: int) -> float:
        self[key] = float(super().__len__())
        return self[key]


class Numbers(list[float]):
    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def __len__(self) -> int:
        self.reads += 1
        return super().__len__()


class Drained(deque[float]):
    def __iter__(self) -> Any:
        while super().__len__():
            yield self.popleft()


USES: dict[str, tuple[Any, Any]] = {
    "recent": (Recent, lambda held, n: held.__setitem__(n, float(n)) or held[next(iter(held))]),
    "counting": (lambda: Counting({0: 1.0}), lambda held, n: held[0] + held.reads),
    "filling": (Filling, lambda held, n: held[n % 3] + dict.__len__(held)),
    "numbers": (lambda: Numbers([1.0, 2.0]), lambda held, n: held[n % 2] + held.reads),
    "drained": (Drained, lambda held, n: held.append(float(n)) or (sum(held) if n % 4 == 0 else n)),
}


class Net(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 0
        make, self.use = USES[what]
        self.held = make()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.n += 1
            return self.b(h) * (1 + 0.01 * self.use(self.held, self.n))


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize("what", USES)
def test_only_the_forward_uses_them(what: str, schedule: str) -> None:
    """What is compared before and after a step is read past the methods of their classes."""
    net = Net(what)
    plain, x = copy.deepcopy(net), torch.randn(6, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, schedule=schedule)
    for _ in range(4):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 3)
    assert difference(net, plain, loss, expected).same
    assert vars(net.held) == vars(plain.held)
    assert _members(net.held) == _members(plain.held)


def _members(held: Any) -> list[Any]:
    base = next(base for base in (OrderedDict, dict, list, deque) if isinstance(held, base))
    members = [*base.__iter__(held)]
    return members if base in (list, deque) else [(key, dict.get(held, key)) for key in members]


def test_a_module_that_is_not_made_yet_may_be_in_reach() -> None:
    """It has no tables of torch's: the recording failed on the first one."""
    net, x = Net("numbers"), torch.randn(6, 4)
    net.held.later = [nn.Linear.__new__(nn.Linear)]
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, None, square, 3)).same


class Leads(nn.Module):
    """It counts, and has what leads to itself, and a proxy of one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.node: list[object] = ["root", None]
        self.node[1] = ["child", self.node]
        self.again = weakref.proxy(self.b)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.c += 1
            out: Tensor = self.again(h) * self.c
            return out


def test_a_list_that_leads_to_itself_and_a_proxy_of_a_module_are_fine() -> None:
    """They were a RecursionError and a TypeError about hashes."""
    net = Leads()
    with bp.Pipeline(net, devices=stages(2), chunks=2) as pipe:
        pipe.forward_backward(torch.randn(4, 4), target=torch.randn(4, 4), loss_fn=mse_loss)
    assert net.c == 2
