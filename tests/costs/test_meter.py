"""What operations cost, and where the host would wait."""

from collections import Counter

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.costs.meter import Meter
from blockpipe.costs.rates import STATED_CPU
from blockpipe.costs.work import PRODUCT, Operation, Work

from ..models import square


class Asks(nn.Module):
    """Reads values in several ways, one a line."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with bp.Block(0):
            x = self.layer(x)
        with bp.Block(1):
            if x.sum() > -1e9:
                x = x + 1
            x = x[x.isfinite().all(1)]
            index = torch.nonzero(x.isfinite().all(1))
            return x[index[:, 0]] * float(x.detach().mean() * 0 + 1)


WAYS = ["a tensor's value", "nonzero()", "nonzero()", "a tensor's value"]


def lines_of(found):
    return [int(sync.where.rpartition(":")[2]) for sync in found]


def test_host_syncs_have_operation_and_line():
    """Every place once, in order, however often it runs."""
    with bp.host_syncs() as found:
        for _ in range(3):
            Asks()(torch.randn(3, 4))
    assert [sync.operation[: len(way)] for sync, way in zip(found, WAYS, strict=True)] == WAYS
    assert lines_of(found) == sorted(lines_of(found))
    assert all(sync.where.startswith(__file__) for sync in found)


def test_host_syncs_of_a_pipeline():
    """Seen in the threads of its stages too; and the recording has them, for the summary."""
    net = Asks()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    pipe.summary(torch.randn(4, 4))
    with bp.host_syncs() as found:
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)
    recorded = bp.record(net, torch.randn(2, 4)).host_syncs
    in_forward, in_backward = found[:-1], found[-1]
    assert recorded == in_forward
    assert in_backward.operation.endswith("indexing with a mask"), "of line 24, as it goes back"
    note = next(line for line in str(pipe.summary()).splitlines() if "the host waits" in line)
    assert f"test_meter.py:{lines_of(found)[0]}: a tensor's value" in note


def test_nothing_is_reported_of_a_forward_that_asks_nothing():
    """Views, arithmetic, an embedding, attention."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with bp.host_syncs() as found:
        layer(torch.randn(2, 3, 8)).sum().backward()
    assert found == []


def test_costs_of_a_linear_layer():
    """Arithmetic and bytes can be counted by hand; views cost nothing."""
    spent = []
    x, weight = torch.randn(8, 16), torch.randn(32, 16)
    with Meter(lambda *cost: spent.append(cost)):
        x @ weight.t()
    made = 8 * 32 * 4
    moved = 8 * 16 * 4 + 32 * 16 * 4 + made
    product = Operation(PRODUCT, "float32", 2 * 8 * 16 * 32, moved)
    assert spent == [(Work(Counter([product])), made)]


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        (lambda: torch.mv(torch.ones(3, 4), torch.ones(4)), 2 * 3 * 4),
        (lambda: torch.dot(torch.ones(5), torch.ones(5)), 2 * 5),
        (lambda: torch.cdist(torch.ones(2, 6, 3), torch.ones(2, 5, 3)), 2 * 2 * 6 * 5 * 3),
        (lambda: torch.cdist(torch.ones(30, 3), torch.ones(40, 3)), 2 * 30 * 40 * 3),
        (lambda: nn.Bilinear(3, 4, 5)(torch.ones(2, 3), torch.ones(2, 4)), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_arithmetic_that_torch_does_not_count(operation, flops):
    """These are not in its registry."""
    spent = []
    with Meter(lambda work, _: spent.extend(work.forward.elements())):
        operation()
    assert sum(one.flops for one in spent) == flops


class Sequences(nn.Module):
    """An LSTM's outputs, without its states."""

    def __init__(self, *sizes, **options):
        super().__init__()
        self.lstm = nn.LSTM(*sizes, batch_first=True, **options)

    def forward(self, x):
        return self.lstm(x)[0]


LSTMS = [
    ((256, 256), {}, (8, 32)),
    ((128, 256), {"num_layers": 2, "bidirectional": True, "dropout": 0.1}, (4, 20)),
    ((300, 100), {"num_layers": 2, "bias": False}, (16, 50)),
    ((40, 200), {}, (32, 25)),
    ((300, 100), {"num_layers": 2, "dtype": torch.bfloat16}, (16, 50)),
]


@pytest.mark.parametrize(("sizes", "options", "batch"), LSTMS)
def test_an_lstm_on_the_cpu_has_its_arithmetic_and_what_it_keeps(sizes, options, batch):
    """It is one operation, which torch's registry does not have, and its workspace is empty if it
    is fake: it was the cheapest layer of a model, and balance put all of them on one stage."""
    net = Sequences(*sizes, **options)
    x = torch.randn(*batch, sizes[0], dtype=options.get("dtype"))
    (hop,) = bp.record(net, x).hops
    matrices = [p for p in net.parameters() if p.dim() == 2]
    assert hop.flops == 2 * batch[0] * batch[1] * sum(p.numel() for p in matrices)

    saved = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    assert hop.never.full == pytest.approx(sum(s.nbytes() for s in saved.values()), rel=0.1)


def test_an_lstm_keeps_nothing_where_nothing_goes_back():
    """Without grad there is no workspace."""
    with torch.no_grad():
        (hop,) = bp.record(Sequences(64, 64), torch.randn(4, 8, 64)).hops
    assert hop.never.full == 0
    assert hop.largest_bytes < 20_000, "the outputs"


@pytest.mark.parametrize("width", [8, 64])
def test_a_recording_has_the_costs_of_its_hops(width):
    """By hop, without doing the arithmetic; twice the work is twice the count."""
    net = bp.begin_blocks(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), {"1": 1})
    first, second = bp.record(net, torch.randn(4, width)).hops
    assert first.flops == 2 * 4 * width * width
    assert second.flops == 2 * first.flops
    assert (first.kernels, second.kernels) == (1, 2)
    assert second.never.bytes == 2 * 4 * width * 4  # the inputs of two layers
    assert 0 < STATED_CPU.forward(first.work) < STATED_CPU.forward(second.work)
