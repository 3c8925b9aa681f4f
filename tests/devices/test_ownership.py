"""Weights that are views of one storage, in several stages."""

import copy

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import blockpipe as bp

from ..alike import DEVICE
from ..models import linears
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


def _in_one_storage(net: nn.Module) -> nn.Module:
    vector_to_parameters(parameters_to_vector(net.parameters()).detach(), net.parameters())
    return net


def test_weights_in_one_storage_run_isolated() -> None:
    """On two devices each has a copy: the sanitizer said that one stage owns all of them."""
    net = _in_one_storage(linears(4))
    plain, x = copy.deepcopy(net).to(DEVICE), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(4), chunks=2, isolate=True)
    for _ in range(2):
        loss = pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss
        x_there = x.to(DEVICE)
        assert_close(loss, plain_step(plain, (x_there,), {}, x_there, mse_loss, 2))
        assert_same_gradients(net, plain)
