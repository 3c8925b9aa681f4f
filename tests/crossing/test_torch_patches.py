"""What of torch's is replaced while a step runs."""

import copy
from collections.abc import Callable
from typing import Any

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
