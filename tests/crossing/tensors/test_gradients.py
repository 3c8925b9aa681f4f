"""Gradients on their way between hops."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ...alike import DEVICE
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages


class Explained(nn.Module):
    """Keeps the gradient of what crosses, as Grad-CAM does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            h.retain_grad()
            self.seen = h
            return self.b(h)


def test_a_tensor_that_retains_its_gradient_lives_until_its_backward_is_over():
    """Attack 24: the next micro-batch's forward dropped it in one lane, while torch's engine came
    to it in another: the process ended."""
    net = Explained()
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=6)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(10):
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (x.to(DEVICE),), {}, y, mse_loss, 6))
    assert_same_gradients(net, plain)
    assert_close(net.seen.grad, plain.seen.grad)
