"""Hooks on parameters that step in the backward."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


def _net() -> nn.Sequential:
    return bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), {"2": 1})


def _step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_step_after_each_micro_batchs_gradient_is_refused(schedule: str):
    """A micro-batch whose forward was over got gradients of other values than the next one."""
    net = _net()
    net[0].weight.register_post_accumulate_grad_hook(_step)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    match = r"a hook writes to a parameter of shape \(4, 4\) after .* 1 of 4.*'sequential'"
    with pytest.raises(StateError, match=match):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    assert len(net[0].weight._post_accumulate_grad_hooks) == 1, "only the user's is left"


def test_a_step_after_each_micro_batchs_gradient_is_the_plain_loops_one_by_one():
    net, x = _net(), torch.randn(8, 4)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        model[0].weight.register_post_accumulate_grad_hook(_step)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=torch.mean).loss
        assert_close(loss, plain_step(plain, (x,), {}, None, torch.mean, 4))
    assert_close(net[0].weight, plain[0].weight)


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_step_after_the_last_micro_batchs_gradient_is_fine(chunks: int):
    net, x = _net(), torch.randn(8, 4)
    plain = copy.deepcopy(net)
    for model in (net, plain):
        calls = [0]

        def step(parameter: Tensor, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] % chunks == 0:
                _step(parameter)

        model[0].weight.register_post_accumulate_grad_hook(step)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=chunks)
    for _ in range(3):
        pipe.forward_backward(x, loss_fn=torch.mean)
        plain_step(plain, (x,), {}, None, torch.mean, chunks)
    assert_same_gradients(net, plain)
    assert_close(net[0].weight, plain[0].weight)
