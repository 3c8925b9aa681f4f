"""A pipelined step beside the plain loop on one device: on the CPU, or with ``--simulated`` on the
simulated accelerator, where stages are on devices of their own."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from .models import square
from .parity import assert_same_gradients, difference, plain_step
from .stage_devices import assert_close, stages

DEVICE = torch.device(stages(1)[0])  # of the plain loop


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


def check_trains_alike(net: nn.Module, *, width: int = 4, chunks: int = 4) -> None:
    """Two steps of two stages with a target give the plain loop's losses and gradients to rounding.

    Args:
        net: takes and returns `(8, width)`.
        width: of its input and output.
        chunks: the micro-batches.
    """
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=chunks)
    for _ in range(2):
        x, y = torch.randn(8, width), torch.randn(8, width)
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (x.to(DEVICE),), {}, y, mse_loss, chunks))
        assert_same_gradients(net, plain)
