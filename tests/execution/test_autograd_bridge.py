"""``pipe(x)`` as a part of the caller's graph."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

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
