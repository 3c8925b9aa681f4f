"""What changes between a pipeline's forward and a backward that recomputes activations."""

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...stage_devices import stages


class Scales(nn.Module):
    """Asks for its mode, and has a bias, which no backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)).tanh()) * (3.0 if self.training else 1.0)


def _pipe(checkpoint: str, **options: object) -> tuple[bp.Pipeline, nn.Sequential]:
    net = bp.begin_blocks(nn.Sequential(Scales(), Scales()), {"1": 1})
    return bp.Pipeline(net, devices=stages(2), chunks=2, checkpoint=checkpoint, **options), net


def _writes_a_weight(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[1].a.weight.mul_(2.0)


def _writes_a_bias(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[0].a.bias.add_(2.0)


def _loads(net: nn.Sequential) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})


def _swaps(net: nn.Sequential) -> None:
    net[1].a.weight.data = 2.0 * net[1].a.weight.data


def _replaces(net: nn.Sequential) -> None:
    net[1].b.weight = nn.Parameter(2.0 * net[1].b.weight.detach())


CHANGES = {
    "data": (_swaps, "'1.a.weight' was written to between"),
    "replaced": (_replaces, "'1.b.weight' was replaced between"),
    "weight": (_writes_a_weight, "'1.a.weight' was written to between"),
    "bias": (_writes_a_bias, "'0.a.bias' was written to between"),
    "state": (_loads, "was written to between"),
    "mode": (lambda net: net.eval(), r"was set to eval\(\) between"),
    "mode of a part": (lambda net: net[1].norm.eval(), r"'1.norm' was set to eval\(\) between"),
}


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_when_the_backward_recomputes_is_refused(change: str, warm: int) -> None:
    """The first step told of other numbers; from the second one on, they were taken silently."""
    does, message = CHANGES[change]
    pipe, net = _pipe("always")
    x = torch.randn(4, 4)
    for _ in range(warm):
        pipe(x).sum().backward()
    output = pipe(x)
    does(net)
    with pytest.raises(StateError, match=message):
        output.sum().backward()
    net.train()
    pipe(x).sum().backward()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_change_when_activations_are_kept_is_fine(checkpoint: str) -> None:
    """A mode, and a bias, are nothing that a backward reads."""
    pipe, net = _pipe(checkpoint)
    x = torch.randn(4, 4)
    if checkpoint == "except_last":
        pipe.chunks = 1  # the last one
    kept = pipe(x)
    kept.sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    output = pipe(x)
    net.eval()
    _writes_a_bias(net)
    output.sum().backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_two_forwards_before_their_backwards_recompute() -> None:
    """Running statistics, which forwards write, are no reason to refuse."""
    pipe, net = _pipe("always")
    one, other = pipe(torch.randn(4, 4)), pipe(torch.randn(4, 4))
    (one.sum() + other.sum()).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
