"""Modules that ``torch.jit`` has made train on the stages of a model as the plain loop does."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.* is deprecated"  # torch's own, of two categories
)


def _traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(2, 4))


def _scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)


def _frozen(module: nn.Module) -> nn.Module:
    return torch.jit.freeze(_traced(module.eval()))


def _loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(_traced(module), file)
    file.seek(0)
    return torch.jit.load(file)


def _net(made: Callable[[nn.Module], nn.Module], stage: int) -> nn.Module:
    """Two stages: each of them trains a layer, and the one that is asked for calls a made module."""
    torch.manual_seed(0)
    first, second = [nn.Linear(4, 4)], [nn.Linear(4, 4)]
    (first, second)[stage].append(made(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    return bp.begin_blocks(nn.Sequential(nn.Sequential(*first), nn.Sequential(*second)), {"1": 1})


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("made", [_traced, _scripted, _frozen, _loaded])
def test_a_module_of_torch_jit_trains_on_any_stage(made, stage: int) -> None:
    """One that was traced ended the recording with a ``KeyError``: it has no slots of its own."""
    net, plain = _net(made, stage), _net(made, stage)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    found = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    assert_close(found.loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)
