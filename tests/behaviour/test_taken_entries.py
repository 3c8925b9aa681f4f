"""Methods that read or set one entry of a dictionary: those of other stages' keys are theirs."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import plain_step
from ..stage_devices import assert_close, stages

Use = Callable[["Two", str, Tensor], Tensor]


class Two(nn.Module):
    """Two stages that use one dictionary, each under a key of its own or under that of the
    first."""

    def __init__(self, use: Use, last: str = "b") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use, self.last = use, last
        self.table: dict[str, object] = {}
        self.moved: OrderedDict[str, int] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.use(self, "a", self.a(x))
        with bp.Block(stage=1):
            return self.use(self, self.last, self.b(h))


def _logs(net: Two, key: str, h: Tensor) -> Tensor:
    net.table.setdefault(key, []).append(h.detach().norm().item())
    return h


def _adds_to_an_array(net: Two, key: str, h: Tensor) -> Tensor:
    net.table.setdefault(key, np.zeros(3))[1] += 1.0
    return h


def _reads_its_own(net: Two, key: str, h: Tensor) -> Tensor:
    seen = net.table.setdefault(key, [])
    seen.append(h.detach().norm().item())
    return h / (1 + sum(seen))


def _adds(net: Two, key: str, h: Tensor) -> Tensor:
    net.table[key] = net.table.setdefault(key, 0.0) + h.detach().norm().item()
    return h / (1 + net.table[key])


def _pops(net: Two, key: str, h: Tensor) -> Tensor:
    total = net.table.pop(key, 0.0) + h.detach().norm().item()
    net.table[key] = total
    return h / (1 + total)


def _pops_first(net: Two, key: str, h: Tensor) -> Tensor:
    net.table.pop(key, None)
    net.table[key] = h.detach().norm().item()
    return h / (1 + net.table[key])


def _gets(net: Two, key: str, h: Tensor) -> Tensor:
    seen = net.table.get(key)
    if seen is None:
        seen = net.table[key] = []
    seen.append(h.detach().norm().item())
    return h / (1 + sum(seen))


def _moves(net: Two, key: str, h: Tensor) -> Tensor:
    if key in net.moved:
        net.moved.move_to_end(key)
    else:
        net.moved[key] = 0
    net.moved[key] += 1
    return h / net.moved[key]


def _counts(net: Two, key: str, h: Tensor) -> Tensor:
    net.counts.setdefault(key, 3)
    net.counts[key] += 1
    return h / net.counts[key]


USES = [
    *(_logs, _adds_to_an_array, _reads_its_own, _adds, _pops, _pops_first, _gets, _moves, _counts),
]


@pytest.mark.parametrize("use", USES)
def test_entries_of_each_stages_own_are_the_plain_loops(use: Use) -> None:
    """A method that takes a key counted as a change of the whole dictionary, and was refused."""
    net, x, y = Two(use), torch.randn(8, 4), torch.randn(8, 4)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, y, F.mse_loss, 4)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    for name in ("table", "moved", "counts"):
        ours, theirs = dict(getattr(net, name)), dict(getattr(plain, name))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert np.allclose(ours[key], value), (name, key)


@pytest.mark.parametrize("use", USES)
def test_an_entry_that_two_stages_use_is_refused(use: Use) -> None:
    """What one stage leaves there, the other one would find, of another micro-batch."""
    pipe = bp.Pipeline(Two(use, last="a"), devices=stages(2), chunks=4)
    with pytest.raises(
        StateError, match=r"(entry 'a' of .*|an ndarray, .*) on hops \[0, 1\] \(.*test_taken_ent"
    ):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def _reads_the_firsts(net: Two, key: str, h: Tensor) -> Tensor:
    net.table.setdefault(key, []).append(h.detach().norm().item())
    return h / (1 + net.table["a"][-1])


def _reads_all(net: Two, key: str, h: Tensor) -> Tensor:
    net.table.setdefault(key, []).append(h.detach().norm().item())
    return h / (1 + sum(map(len, net.table.values())))


def _reads_the_last(net: Two, key: str, h: Tensor) -> Tensor:
    net.moved[key] = len(h)
    net.moved.move_to_end(key)
    return h / (1 + next(reversed(net.moved.values())))


@pytest.mark.parametrize("use", [_reads_the_firsts, _reads_all, _reads_the_last])
def test_an_entry_that_another_stage_reads_too_is_refused(use: Use) -> None:
    """A key of each stage's own is no key of its own if another stage reads the entry by another
    way."""
    pipe = bp.Pipeline(Two(use), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"reads it on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def test_an_entry_that_a_backward_makes_and_the_forward_reads_is_refused() -> None:
    """In a hook, ``setdefault`` counted as a read of the entry alone."""

    def divides(net: Two, key: str, h: Tensor) -> Tensor:
        return h / (1 + len(net.table.get(key, ())))

    net = Two(divides)

    def hook(module: nn.Module, given: object, got: tuple[Tensor, ...]) -> None:
        net.table.setdefault("a", []).append(got[0].norm().item())

    net.a.register_full_backward_hook(hook)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="entry 'a' of a dict in a backward"):
        pipe.forward_backward(torch.randn(8, 4, requires_grad=True), loss_fn=torch.sum)
