"""Numbers that a training loop sets, and by which a forward chooses its layers: as an index, a slice's
bound, or a loop's length."""

import copy
import re
import warnings
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import stages

ORDERS = [(0, 1, 0, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2), (2, 1, 2, 0, 2, 1)]


class Chosen(nn.Module):
    """Layers with batch norm, of which a number that is set between steps chooses some."""

    def __init__(self, choose: Callable[["Chosen", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.choose = nn.Linear(4, 4), nn.Linear(4, 4), choose
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(5)
        )
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.first(x).tanh()
        with bp.Block(stage=1):
            return self.last(self.choose(self, x))


def _by_index(net: Chosen, x: Tensor) -> Tensor:
    return net.layers[net.n](x)


def _by_computed_index(net: Chosen, x: Tensor) -> Tensor:
    return net.layers[2 * net.n % 5](x)


def _by_local_index(net: Chosen, x: Tensor) -> Tensor:
    n = net.n
    layer = [*net.layers][n]
    return layer(x)


def _by_slice(net: Chosen, x: Tensor) -> Tensor:
    for layer in net.layers[: 1 + net.n]:
        x = layer(x)
    return x


def _by_range(net: Chosen, x: Tensor) -> Tensor:
    for index in range(net.n + 1):
        x = net.layers[index](x)
    return x


def _by_islice(net: Chosen, x: Tensor) -> Tensor:
    for layer in islice(net.layers, net.n + 1):
        x = layer(x)
    return x


WAYS = [_by_index, _by_computed_index, _by_local_index, _by_slice, _by_range, _by_islice]


CASES = [(way, ORDERS[0], "never") for way in WAYS] + [(_by_index, o, "always") for o in ORDERS]


@pytest.mark.parametrize(("way", "order", "checkpoint"), CASES)
def test_layers_that_a_number_chooses_are_recorded_for_each_number(
    way: Callable[[Chosen, Tensor], Tensor], order: tuple[int, ...], checkpoint: str
) -> None:
    """Their buffers are written once, with recomputation too."""
    net = Chosen(way).to(stages(1)[0])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, checkpoint=checkpoint)
    for net.n in order:
        plain.n = net.n
        x = torch.randn(6, 4)
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x.to(stages(1)[0]),), {}, None, square, 3)
        found = difference(net, plain, loss, expected)
        assert found.same, found


def test_stages_that_a_number_adds_are_recorded_for_each_number() -> None:
    """A layer behind the last one may be on another stage."""

    class Growing(Chosen):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers[: 2 + self.n]):
                with bp.Block(stage=index // 2):
                    x = layer(x)
            return self.last(x)

    net = Growing(_by_index).to(stages(1)[0])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3)
    for net.n in (2, 1, 2, 0, 2, 1, 0):
        plain.n = net.n
        x = torch.randn(6, 4)
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x.to(stages(1)[0]),), {}, None, square, 3)
        found = difference(net, plain, loss, expected)
        assert found.same, found


def test_a_part_of_a_tensor_needs_no_recording_of_its_own() -> None:
    """It leads the forward nowhere else, and may change in each step."""
    net = Chosen(lambda net, x: x.clone()[:, net.n % 4 :].sum(1, keepdim=True) * x)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    recorded = set()
    for net.n in range(12):
        pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
        recorded.add(id(pipe.recording))
    assert len(recorded) <= 3


def test_an_index_that_is_another_one_in_each_step_has_steps_run_one_by_one() -> None:
    net = Chosen(lambda net, x: net.layers[net.table[net.n]](x))
    net.table = [index % 5 for index in range(40)]
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    x = torch.randn(6, 4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for net.n in range(20):
            loss = pipe.forward_backward(x, loss_fn=square).loss
    (one,) = (w for w in warned if "one by one" in str(w.message))
    assert re.search(r"as an index.*test_indices_between_steps\.py", str(one.message))
    for plain.n in range(20):
        expected = plain_step(plain, (x.to(stages(1)[0]),), {}, None, square, 3)
    found = difference(net, plain, loss, expected)
    assert found.same, found
