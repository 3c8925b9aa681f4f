"""What of torch's is replaced while a step runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp

from ..alike import DEVICE
from ..models import square
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

compiled = list[str]()


def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that compiles nothing, and says what it was given."""
    compiled.append(",".join(node.name for node in graph.graph.nodes if "call" in node.op))
    return graph.forward


@torch.compile(backend=backend)
def gated(x: Tensor) -> Tensor:
    return F.gelu(x) * x.sigmoid()


class Gate(nn.Module):
    @torch.compile(backend=backend)
    def forward(self, x: Tensor) -> Tensor:
        return x.cos() * x.sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.gate = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), Gate()

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage=stage):
                x = gated(layer(x)) if stage != 1 else self.gate(layer(x))
        return x


def test_compiled_functions_run_as_written_in_the_forwards_own_code():
    """Attack 21: refused, with a name of the compiler's. In a module on one stage they are
    compiled; elsewhere the compiler would trace what moves the tensors."""
    net, x = Net(), torch.randn(8, 4)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    compiled.clear()
    losses = [pipe.forward_backward(x, loss_fn=square).loss for _ in range(2)]
    assert set(compiled) == {"cos,sin,mul"}
    for loss in losses:
        assert_close(loss, plain_step(plain, (x.to(DEVICE),), {}, None, square, 4))
    assert_same_gradients(net, plain)


@pytest.mark.filterwarnings("ignore:.*prototype stage")  # nested tensors
@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
@pytest.mark.parametrize("others", [False, True])
def test_an_encoder_takes_torchs_fast_path_in_evaluation(schedule: str, *, others: bool):
    """Attack 24: with any mode on it leaves that out, and what is padded was another number."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plain = nn.TransformerEncoder(layer, 3).eval()
    net = bp.begin_blocks(copy.deepcopy(plain), {"layers.1": 1})
    x, pad = torch.randn(8, 6, 8), torch.zeros(8, 6, dtype=torch.bool)
    pad[:, 4:] = True
    if others:
        pad[::2, 3:] = True
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule=schedule)
    with torch.no_grad():
        parts = zip(x.chunk(4), pad.chunk(4), strict=True)
        expected = [plain(part, src_key_padding_mask=its) for part, its in parts]
        found = pipe(x, src_key_padding_mask=pad)
    assert (found[pad] == 0).all()
    torch.testing.assert_close(found, torch.cat(expected))
