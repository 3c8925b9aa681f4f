"""A pipelined step beside the plain loop on one device: on the CPU, or with ``--simulated`` on the
simulated accelerator, where stages are on devices of their own."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

from .devices import stages
from .parity import difference, plain_step

DEVICE = torch.device(stages(1)[0])  # of the plain loop
SCHEDULES = ["1f1b", "gpipe", "sequential", "uncut"]


def square(output: Tensor) -> Tensor:
    """A loss of the output alone."""
    return output.square().mean()


class Scripted(nn.Module):
    """Three layers, and a forward that is given."""

    def __init__(self, script: Any, layer: Any = None) -> None:
        super().__init__()
        make = layer or (lambda: nn.Linear(4, 4))
        self.a, self.b, self.c = make(), make(), make()
        self.script = script

    def forward(self, x: Tensor) -> Any:
        return self.script(self, x)


def ran(
    model: nn.Module, x: Any, *, devices: list[str], **options: Any
) -> tuple[nn.Module, Tensor]:
    """A copy of a model after a pipelined step, and the loss."""
    net = copy.deepcopy(model)
    pipe = bp.Pipeline(net, devices=devices, **{"chunks": 3, **options})
    return net, pipe.forward_backward(x, loss_fn=square).loss


def same(one: nn.Module, other: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
    """Gradients, buffers and losses are the same: to the bit on the CPU, else to rounding."""
    found = difference(one, other, *losses)
    assert found.same, found


def check_alike(model: nn.Module, x: Tensor, *, count: int = 3, **options: Any) -> None:
    """A pipelined step gives the plain loop's gradients."""
    plain = copy.deepcopy(model).to(DEVICE)
    batch = x.clone().to(DEVICE)
    expected = plain_step(plain, (batch,), {}, None, square, options.get("chunks", 3))
    piped, loss = ran(model, x, devices=stages(count), **options)
    same(piped, plain, (loss, expected))
