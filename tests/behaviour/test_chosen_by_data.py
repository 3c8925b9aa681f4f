"""What the data choose: a function, an expert, an entry, an object or a name. A recording sees one;
what another one reads of another stage's values is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)
Damp = Callable[["Net", Tensor, Tensor], Tensor]


class Expert(nn.Module):
    """Divides by its load."""

    def __init__(self) -> None:
        super().__init__()
        self.load = 1.0

    def forward(self, h: Tensor) -> Tensor:
        return h / self.load


class Net(nn.Module):
    """Its first stage changes what hot batches use, and the second one asks whether it is hot; no
    batch here is."""

    def __init__(self, damp: Damp) -> None:
        super().__init__()
        self.a, self.b, self.damp = nn.Linear(4, 4), nn.Linear(4, 4), damp
        self.experts = nn.ModuleList([Expert(), Expert()])
        self.named = nn.ModuleDict({"cold": Expert(), "hot": Expert()})
        self.plain, self.table = [Expert(), Expert()], {"cold": 1.0, "hot": 1.0}
        self.scale_cold = self.scale_hot = self.seen = 1.0
        self.own = {"cold": 1.0, "hot": 1.0}

    def do_cold(self, h: Tensor) -> Tensor:
        return h

    def do_hot(self, h: Tensor) -> Tensor:
        return h / self.seen

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            for expert in (self.experts[1], self.named["hot"], self.plain[1]):
                expert.load += 1.0
            self.table["hot"] += 1.0
            self.scale_hot += 1.0
            self.seen += 1.0
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(self.damp(self, x, h))


def _is_hot(x: Tensor) -> bool:
    return bool((x > 50).any().item())


def _which(x: Tensor) -> str:
    return "hot" if _is_hot(x) else "cold"


def _of_an_object(net: Net, x: Tensor, h: Tensor) -> Tensor:
    chosen = net.plain[1] if _is_hot(x) else net.plain[0]
    return h / chosen.load


def _of_a_part(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for expert in net.plain[1 : 1 + int((x > 50).sum())]:
        h = expert(h)
    return h


def _of_each(net: Net, x: Tensor, h: Tensor) -> Tensor:
    hot = [value for value in x[:, 0].tolist() if value > 50]
    for factor in map(lambda value: net.seen, hot):  # noqa: C417
        h = h / factor
    return h


CHOICES: dict[str, Damp] = {
    "entry": lambda net, x, h: h / net.table[_which(x)],
    "expert": lambda net, x, h: net.experts[int(_is_hot(x))](h),
    "named expert": lambda net, x, h: net.named[_which(x)](h),
    "plain expert": lambda net, x, h: net.plain[int(_is_hot(x))](h),
    "expert's load": lambda net, x, h: h / net.experts[int(_is_hot(x))].load,
    "function": lambda net, x, h: [net.do_cold, net.do_hot][int(_is_hot(x))](h),
    "function of a table": lambda net, x, h: {True: net.do_hot, False: net.do_cold}[_is_hot(x)](h),
    "name": lambda net, x, h: h / getattr(net, f"scale_{_which(x)}"),
    "method": lambda net, x, h: getattr(net, "do_" + _which(x))(h),
    "object": _of_an_object,
    "part": _of_a_part,
    "each": _of_each,
}


@pytest.mark.every
@pytest.mark.parametrize("choice", CHOICES)
def test_what_the_data_may_choose_is_refused_where_another_stage_sets_it(choice: str) -> None:
    """The chosen one alone was looked at."""
    pipe = bp.Pipeline(Net(CHOICES[choice]), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"hot|load|seen"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _index(at: int) -> str:
    return ["cold", "hot"][at]


def _counted(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.own[_which(x)] += 1.0
    return h / net.own[_which(x)]


def _in_turn(net: Net, x: Tensor, h: Tensor) -> Tensor:
    for at in range(1):
        h = net.experts[at](h) / net.table[_index(at)]
    return h * (1 + 0 * x.sum().item())


@pytest.mark.parametrize("damp", [_counted, _in_turn], ids=lambda damp: damp.__name__)
def test_what_a_stage_alone_chooses_from_and_what_no_data_choose_runs(damp: Damp) -> None:
    net = Net(damp)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        plain_step(plain, (X.to(DEVICE),), {}, X.to(DEVICE), mse_loss, 4)
    assert_same_gradients(net, plain)
