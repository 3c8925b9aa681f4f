"""Hooks of the pipeline itself, beside those of its model."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import UsageError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

HOOKS = {
    "register_forward_pre_hook": ("forward pre-hooks", lambda _, args: (args[0] * 2,)),
    "register_forward_hook": ("forward hooks", lambda _, args, output: output * 2),
    "register_full_backward_pre_hook": ("backward pre-hooks", lambda _, after: (after[0] * 2,)),
    "register_full_backward_hook": ("backward hooks", lambda _, before, after: None),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return bp.begin_blocks(net, {"2": 1})


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)


@pytest.mark.parametrize("register", HOOKS)
def test_a_step_when_the_pipeline_has_a_hook_is_refused_until_it_is_on_the_model(register) -> None:
    """A call of the pipeline would run the hook once, and ``forward_backward`` never."""
    name, hook = HOOKS[register]
    pipe, plain = bp.Pipeline(_net(), devices=stages(2), chunks=3), _net()
    x, y = _batch()
    handle = getattr(pipe, register)(hook)
    with pytest.raises(UsageError, match=f"got one with {name}, which.*register them on pipe.mod"):
        pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    handle.remove()
    getattr(pipe.module, register)(hook)
    getattr(plain, register)(hook)
    result = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    assert_close(result.loss, plain_step(plain, (x,), {}, y, mse_loss, 3))
    assert_same_gradients(pipe.module, plain)


def test_a_call_when_the_pipeline_has_hooks_runs_them() -> None:
    """With gradients and without, as for every module."""
    pipe, plain = bp.Pipeline(_net(), devices=stages(2), chunks=3), _net()
    x, _ = _batch()
    for module in (pipe, plain):
        module.register_forward_hook(HOOKS["register_forward_hook"][1])
    with torch.no_grad():
        assert_close(pipe(x), plain(x))
    pipe(x).sum().backward()
    plain(x).sum().backward()
    assert_close([p.grad for p in pipe.module.parameters()], [p.grad for p in plain.parameters()])
