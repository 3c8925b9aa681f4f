"""What operations cost, and where the host would wait."""

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.meter import Meter


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
        pipe.forward_backward(torch.randn(4, 4), loss_fn=lambda out: out.square().mean())
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
    assert spent == [(2 * 8 * 16 * 32, 8 * 16 * 4 + 32 * 16 * 4 + made, made, False)]


@pytest.mark.parametrize("width", [8, 64])
def test_a_recording_has_the_costs_of_its_hops(width):
    """By hop, without doing the arithmetic; twice the work is twice the count."""
    net = bp.begin_blocks(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), {"1": 1})
    first, second = bp.record(net, torch.randn(4, width)).hops
    assert first.flops == 2 * 4 * width * width
    assert second.flops == 2 * first.flops
    assert (first.kernels, second.kernels) == (1, 2)
    assert second.never.bytes == 2 * 4 * width * 4  # the inputs of two layers
    assert 0 < first.cpu_seconds < second.cpu_seconds
