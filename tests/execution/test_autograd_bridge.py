"""``pipe(x)`` as a part of the caller's graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..alike import DEVICE
from ..parity import assert_same_gradients
from ..stage_devices import stages


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_that_comes_after_the_forward_is_called_with_gradients_only(*, fails: bool):
    """Attack 24: the one parameter that stands for the others got a gradient of ``None`` at the
    end."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    pipe, seen = bp.Pipeline(net, devices=stages(2), chunks=2), list[Tensor]()

    def hook(gradient: Tensor) -> None:
        seen.append(gradient)
        if fails and len(seen) == 2:
            raise ValueError("of the user's")

    out = pipe(torch.randn(4, 4))
    for parameter in net.parameters():
        parameter.register_hook(hook)
    given = [dict(parameter._backward_hooks) for parameter in net.parameters()]
    if fails:
        with pytest.raises(Exception, match="of the user's"):
            out.sum().backward()
    else:
        out.sum().backward()
        assert len(seen) == 8
    assert all(isinstance(gradient, Tensor) for gradient in seen)
    assert [dict(parameter._backward_hooks) for parameter in net.parameters()] == given


class TwoHeads(nn.Module):
    """Returns what the loss uses, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            return self.c(h), {"aux": self.b(h)}


def test_a_hook_on_an_output_that_the_loss_does_not_use_is_not_called() -> None:
    """It was called with ``None``, since one node collects the gradients of all outputs."""
    net = TwoHeads()
    plain, x = copy.deepcopy(net).to(DEVICE), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    for uses in (False, True):
        seen: list[list[float]] = [[], []]
        for call, given, norms in ((pipe, x, seen[0]), (plain, x.to(DEVICE), seen[1])):
            main, rest = call(given)
            rest["aux"].register_hook(lambda g, norms=norms: norms.append(g.norm().item()))
            main.mul_(2.0)
            (main.square().mean() + (rest["aux"].mean() if uses else 0)).backward()
        assert len(seen[0]) == uses
        assert seen[0] == pytest.approx(seen[1])
        assert_same_gradients(net, plain)
