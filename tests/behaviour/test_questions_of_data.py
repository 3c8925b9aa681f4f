"""Branches that a recording does not take, on any way by which data may decide: what they read of
another stage's values is refused."""

import collections
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE, check_trains_alike
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)
Info = collections.namedtuple("Info", "hot")
Damp = Callable[["Net", Tensor, Tensor], Tensor]


class Part(nn.Linear):
    """A layer with a load."""

    load = 1.0


class Net(nn.Module):
    """Its first stage counts, and its second one damps rows that no batch here has."""

    def __init__(self, damp: Damp) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(4, 4), Part(4, 4)])
        self.b, self.damp, self.seen, self.counts = nn.Linear(4, 4), damp, 0, [0, 0]
        self.rng, self.limit, self.is_on = random.Random(3), 50.0, False

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = x
            self.seen += 1
            self.counts[0] += 1
            for part in self.parts:
                part.load = 0.9 * part.load
                h = part(h)
        with bp.Block(stage=1):
            if x.max().item() > 1e9:  # so that it runs for real
                h = -h
            return self.b(self.damp(self, x.to(h.device), h))

    def scaled(self, h: Tensor, mode: Any) -> Tensor:
        if mode == "hot" or (isinstance(mode, list) and mode):
            return h / self.seen
        return h

    def check(self, x: Tensor) -> None:
        if x.max().item() > self.limit:
            raise ValueError("hot")


def _hot(x: Tensor) -> Tensor:
    return x[x[:, 0] > 50]


def _size(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x[x[:, 0] > 50].size(0) > 0:
        h = h / net.seen
    return h


def _length(net: Net, x: Tensor, h: Tensor) -> Tensor:
    hot = _hot(x)
    return h / net.seen if len(hot) else h


def _shape(net: Net, x: Tensor, h: Tensor) -> Tensor:
    (index,) = torch.where(x[:, 0] > 50)
    taken = h[index] * 2
    return h / net.seen if taken.shape[0] else h


def _number_of(net: Net, x: Tensor, h: Tensor) -> Tensor:
    index = (x[:, 0] > 50).nonzero()
    if index.numel() == 0:
        return h
    return h / net.seen


def _first_ones(net: Net, x: Tensor, h: Tensor) -> Tensor:
    count = int((x[:, 0] > 50).sum())
    if len(torch.arange(count)) or len(h[:count]):
        h = h / net.seen
    return h


def _turns(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for _ in range(len(x[x[:, 0] > 50])):
        h = h / net.seen
    return h


def _chosen(net: Net, x: Tensor, h: Tensor) -> Tensor:
    hot = [value for value in x[:, 0].tolist() if value > 50]
    return h / net.seen if hot else h


def _of_numpy(net: Net, x: Tensor, h: Tensor) -> Tensor:
    array = x.detach().cpu().numpy()
    return h / net.seen if np.flatnonzero(array > 50).size else h


def _entry(net: Net, x: Tensor, h: Tensor) -> Tensor:
    info = {"hot": (x > 50).any().item()}
    return h / net.seen if info["hot"] else h


def _set_entry(net: Net, x: Tensor, h: Tensor) -> Tensor:
    info = dict[str, bool]()
    if (x > 50).any().item():
        info["hot"] = True
    return h / net.seen if info.get("hot") else h


def _field(net: Net, x: Tensor, h: Tensor) -> Tensor:
    info = Info((x > 50).any().item())
    return h / net.seen if info.hot else h


def _filled(net: Net, x: Tensor, h: Tensor) -> Tensor:
    hot = []
    for value in x[:, 0].tolist():
        if value > 50:
            hot.append(1)
    return h / net.seen if hot else h


def _name(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.scaled(h, "hot" if (x > 50).any().item() else "cold")


def _name_by_turns(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mode = "cold"
    if (x > 50).any().item():
        mode = "hot"
    return net.scaled(h, mode)


def _list(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.scaled(h, _hot(x).tolist())


def _shuffled(net: Net, x: Tensor, h: Tensor) -> Tensor:
    order = list(range(400))
    net.rng.shuffle(order)
    return h / net.seen if order[0] == 400 else h


def _no_error(net: Net, x: Tensor, h: Tensor) -> Tensor:
    try:
        net.check(x)
    except ValueError:
        pass
    else:
        return h
    return h / net.seen


def _comprehension(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:
        h = torch.stack([row / net.seen for row in h])
    return h


def _generator(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:
        h = h * sum(part.load for part in net.parts)
    return h


def _lambda(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:
        h = h * max(map(lambda part: part.load, net.parts))  # noqa: C417
    return h


def _by_index(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:
        h = h * sum(net.counts[i] for i in range(2))
    return h


def _of_none(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h * (1 + sum(part.load for part in net.parts[: int((x > 50).any())]))


def _by_a_method(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:
        h = torch.stack([net.scaled(row, "hot") for row in h])
    return h


def _in_a_loop(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for _ in x[x[:, 0] > 50]:
        h = h * sum(part.load for part in net.parts)
    return h


def _function(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if x.max().item() > 50:

        def scale(tensor: Tensor) -> Tensor:
            return tensor / net.seen

        h = scale(h)
    return h


@pytest.mark.every
@pytest.mark.parametrize(
    "damp",
    [
        *(_size, _length, _shape, _number_of, _first_ones, _turns, _chosen, _of_numpy, _entry),
        *(_set_entry, _field, _filled, _name, _name_by_turns, _list, _shuffled, _no_error),
        *(
            _comprehension,
            _generator,
            _lambda,
            _by_index,
            _of_none,
            _function,
            _by_a_method,
            _in_a_loop,
        ),
    ],
    ids=lambda damp: damp.__name__,
)
def test_what_a_branch_by_the_data_reads_of_another_stage_is_refused(damp: Damp) -> None:
    """Attack 40: the condition was taken for one that no data decide, or the code in the branch
    was not looked at."""
    pipe = bp.Pipeline(Net(damp), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"seen|load|a list"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _setting(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h / net.seen if net.is_on else h


def _early_end(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if not net.is_on:
        return h
    return h / net.seen


def _constant_name(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.scaled(h, "cold")


def _in_a_comprehension(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if net.is_on:
        h = torch.stack([row / net.seen for row in h])
    return h


def _kind(net: Net, x: Tensor, h: Tensor) -> Tensor:
    if isinstance(net.b, nn.Conv2d) or h.dim() == 4:
        h = h / net.seen
    return h


def _no_import(net: Net, x: Tensor, h: Tensor) -> Tensor:
    try:
        import math
    except ImportError:
        return h / net.seen
    return h * math.pi


def _skips(net: Net, x: Tensor, h: Tensor) -> Tensor:
    skips = [h]
    if skips:
        h = h + skips.pop()
    return h


@pytest.mark.parametrize(
    "damp",
    [_skips, _setting, _early_end, _constant_name, _in_a_comprehension, _kind, _no_import],
    ids=lambda damp: damp.__name__,
)
def test_a_branch_that_no_data_decide_is_none_of_them(damp: Damp) -> None:
    """Though the forward reads its data."""
    net = Net(damp)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    step = functools.partial(plain_step, plain, (X.to(DEVICE),), {}, X.to(DEVICE), mse_loss, 4)
    for _ in range(2):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        step()
    assert_same_gradients(net, plain)


class Skips(nn.Module):
    """Keeps tensors in a list; its forward reads no data, and so none decide whether some are left."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        with bp.Block(stage=0):
            self.seen += 1
            h = self.a(x)
            skips.append(h)
        with bp.Block(stage=1):
            if skips:
                h = h + skips.pop()
            if skips:
                h = h / self.seen
            return self.b(h)


def test_a_list_of_tensors_is_no_question_where_no_data_are_read() -> None:
    check_trains_alike(Skips())
