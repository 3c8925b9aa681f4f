"""Operators that users write in Python: on fake tensors their bodies do not run."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..models import square
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

SCALE = {"most": 1.0}


@torch.library.custom_op("blockpipe_tests::delayed", mutates_args=())
def delayed(x: Tensor) -> Tensor:
    """Scales by what the last call has seen, as recipes for 8 bits do."""
    scale, SCALE["most"] = SCALE["most"], float(x.abs().max())
    return (x / scale).clamp(-0.5, 0.5) * scale


@torch.library.custom_op("blockpipe_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Keeps nothing."""
    return x * 2


for each in (delayed, doubled):
    each.register_fake(lambda x: torch.empty_like(x))
    each.register_autograd(lambda ctx, gradient: gradient)


class Net(nn.Module):
    def __init__(self, *operators: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        for stage, (layer, operator) in enumerate(zip(self.layers, self.operators, strict=True)):
            with bp.Block(stage=stage):
                x = operator(layer(x))
        return x


@pytest.mark.cpu("a kernel for them")
def test_state_of_an_operator_on_two_stages_is_refused():
    """Attack 20: nobody had looked at its body."""
    pipe = bp.Pipeline(Net(delayed, delayed), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes entry 'most' of a dict on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


@pytest.mark.cpu("a kernel for them")
@pytest.mark.parametrize("operators", [(doubled, doubled), (doubled, delayed)])
def test_operators_that_share_nothing_run(operators):
    net, x = Net(*operators), torch.randn(8, 4)
    plain = Net(*operators)  # operators cannot be copied
    plain.load_state_dict(net.state_dict())
    losses = []
    for _ in range(2):
        SCALE["most"] = 1.0
        loss = (
            bp.Pipeline(net, devices=stages(2), chunks=4).forward_backward(x, loss_fn=square).loss
        )
        SCALE["most"] = 1.0
        losses.append((loss, plain_step(plain, (x,), {}, None, square, 4)))
        assert_close(*losses[-1])
    assert_same_gradients(net, plain)
