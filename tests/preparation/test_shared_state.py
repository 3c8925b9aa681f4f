"""State that micro-batches share only where several are under way, or where there are backwards."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)


class Net(nn.Module):
    """Two layers on two stages; a hook of the second one sets what the first one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.b.weight.register_hook(self.follow)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh() * self.scale
        with bp.Block(stage=1):
            return self.b(h)

    def follow(self, gradient: Tensor) -> None:
        self.scale = 1.0 + float(gradient.norm())


def _pipeline(net: Net, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), **options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices")
def test_what_a_hook_sets_for_the_next_forward_is_fine_where_a_step_has_one_micro_batch() -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    pipe = _pipeline(net, chunks=1)
    for _ in range(2):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        plain_step(plain, (X,), {}, X, mse_loss, 1)
    assert_same_gradients(net, plain)


@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices")
def test_what_a_hook_sets_for_the_next_forward_is_refused_once_a_step_has_more() -> None:
    """A recording for one micro-batch does not serve several."""
    pipe = _pipeline(Net(), chunks=1)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    pipe.chunks = 4
    with pytest.raises(StateError, match="'scale' of the model in a backward"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def test_what_a_hook_sets_is_fine_where_no_backward_runs() -> None:
    net = Net()
    plain = copy.deepcopy(net)
    with torch.no_grad():
        found = _pipeline(net, chunks=4)(X)
        torch.testing.assert_close(found.cpu(), plain(X))
