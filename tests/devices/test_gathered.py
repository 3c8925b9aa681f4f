"""A model that is spread over devices already, and whose forward needs values to be recorded."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import blockpipe as bp
from blockpipe.devices.gathered import gathered
from blockpipe.replicas import Replicas

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, is_simulated, stages


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).relu()
        with bp.Block(stage=1):
            if h.sum().item() < 0:
                h = -h
            return self.b(h)


X, Y = torch.randn(12, 4), torch.randint(0, 3, (12,))


def _piped(net: nn.Module) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=3)


def _copied(pipe: bp.Pipeline) -> bp.Pipeline:
    return copy.deepcopy(pipe)


def _averaged(pipe: bp.Pipeline) -> bp.Pipeline:
    average = AveragedModel(pipe)
    average.update_parameters(pipe)
    return average.module


def _anew(pipe: bp.Pipeline) -> bp.Pipeline:
    return _piped(copy.deepcopy(pipe.module))


def _with_new_head(pipe: bp.Pipeline) -> bp.Pipeline:
    pipe.module.b = nn.Linear(8, 5)
    return pipe


@pytest.mark.parametrize("make", [_copied, _averaged, _anew, _with_new_head])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_what_is_made_of_a_placed_model_runs(make, has_gradients: bool):
    """It was recorded on the host's sample with weights on the stages' devices."""
    pipe = _piped(Asks())
    pipe.forward_backward(X, target=Y, loss_fn=F.cross_entropy)
    if not has_gradients:
        pipe.zero_grad()
    made = make(pipe)
    made.zero_grad()
    plain = copy.deepcopy(made.module).cpu()
    loss = made.forward_backward(X, target=Y, loss_fn=F.cross_entropy).loss
    assert_close(loss, plain_step(plain, (X,), {}, Y, F.cross_entropy, 3))
    assert_same_gradients(made.module, plain)
    assert [str(p.device) for p in made.module.b.parameters()] == stages(2)[1:] * 2


@pytest.mark.skipif(not is_simulated(), reason="needs several devices: --simulated")
def test_all_is_back_on_its_device():
    net = Asks()
    pipe = _piped(net)
    pipe.forward_backward(X, target=Y, loss_fn=F.cross_entropy)
    before = [(p, p.data_ptr(), p.grad, p.grad.data_ptr(), p.device) for p in net.parameters()]
    with gathered(net):
        assert {t.device.type for p in net.parameters() for t in (p, p.grad)} == {"cpu"}
    for p, (same, memory, gradient, its, device) in zip(net.parameters(), before, strict=True):
        assert p is same
        assert p.grad is gradient
        assert (p.data_ptr(), gradient.data_ptr(), p.device) == (memory, its, device)


@pytest.mark.parametrize("first", ["call", "sample", "copies"])
def test_a_first_call_in_inference_mode_leaves_ordinary_parameters(first: str):
    """Lightning evaluates two batches before it trains. The placement made inference tensors of
    them, which cannot be trained."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    bp.begin_blocks(net, {"2": 1})
    with torch.inference_mode():
        if first == "copies":
            pipe = Replicas(net, [stages(4)[:2], stages(4)[2:]], chunks=2)
        elif first == "sample":
            pipe = bp.Pipeline(net, devices=stages(2), chunks=3, sample=((X,), {}))
        else:
            pipe = _piped(net)
        pipe(X)
    assert not any(t.is_inference() for t in (*net.parameters(), *net.buffers()))
    pipe.forward_backward(X, target=Y, loss_fn=F.cross_entropy)
    torch.optim.Adam(net.parameters()).step()
