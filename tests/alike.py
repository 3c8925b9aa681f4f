"""A pipelined step beside the plain loop on one device: on the CPU, or with ``--simulated`` on the
simulated accelerator, where stages are on devices of their own."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

from .devices import stages
from .parity import plain_step

DEVICE = torch.device(stages(1)[0])
IS_ACCELERATOR = DEVICE.type != "cpu"
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


def ran(model: nn.Module, x: Any, *, devices: list[str], **options: Any) -> tuple[Any, Tensor]:
    """A copy of a model after a pipelined step, on the host, and the loss."""
    net = copy.deepcopy(model)
    options = {"chunks": 3, **options}
    pipe = bp.Pipeline(net, devices=devices, **options)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    return on_host(net), loss.cpu()


def on_host(net: nn.Module) -> nn.Module:
    """The same model, its gradients too."""
    for parameter in net.parameters():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.cpu()
        parameter.grad = None if gradient is None else gradient.cpu()
    for module in net.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.cpu()
    return net


def same(one: nn.Module, other: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
    """Gradients, buffers and losses are the same: to the bit on the CPU, else to rounding."""
    kind: Any = torch.testing.assert_close
    near = {"rtol": 1e-5, "atol": 1e-6} if IS_ACCELERATOR else {"rtol": 0, "atol": 0}
    kind(*losses, **near)
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            kind(p.grad, q.grad, **near)
    for (_, p), (_, q) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        kind(p, q, **near)


def check_alike(model: nn.Module, x: Tensor, *, count: int = 3, **options: Any) -> None:
    """A pipelined step gives the plain loop's gradients, and on the simulator no race."""
    plain = copy.deepcopy(model).to(DEVICE)
    expected = plain_step(
        plain, (x.clone().to(DEVICE),), {}, None, square, options.get("chunks", 3)
    )
    piped, loss = ran(model, x, devices=stages(count), **options)
    same(piped, on_host(plain), (loss, expected.cpu()))
    check_races()


def check_races() -> None:
    """On the simulated accelerator: every read waited for its write."""
    if IS_ACCELERATOR:
        from . import simulated

        simulated.settle()
        assert (simulated.races(), simulated.error()) == ([], "")
