"""Draws from random generators of the user's own."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.recording.watching.draws import RandomDraws

from ...models import square
from ...stage_devices import stages


def test_a_generator_when_an_earlier_one_is_gone_is_another_one() -> None:
    """It had the memory of the first one, and the two were taken for one of several hops."""
    run, calls = SimpleNamespace(hop=0), SimpleNamespace(refuse=lambda why: None)
    stand_ins: Any = (run, SimpleNamespace(hops=[]), calls)
    draws = RandomDraws(*stand_ins)
    for hop in range(8):
        run.hop = hop
        draws.drew(torch.Generator())
    assert [use.hops for use in draws.generators.values()] == [[hop] for hop in range(8)]


class Noise(nn.Module):
    """Both stages draw, and may say from which generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.a, self.b, self.generators = nn.Linear(4, 4), nn.Linear(4, 4), (generator,)

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage):
                noise = torch.randn(x.shape, generator=self.generators[0])
                x = layer(x) + noise.to(x.device)
        return x


def test_the_devices_own_generator_is_none_of_the_users() -> None:
    """``torch.default_generator`` by name draws what an operation draws without it."""
    named, x, losses = Noise(torch.default_generator), torch.randn(8, 4), []
    unnamed = Noise(None)
    unnamed.load_state_dict(named.state_dict())
    for net in (named, unnamed):
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
        torch.manual_seed(5)
        losses.append([pipe.forward_backward(x, loss_fn=square).loss.item() for _ in range(2)])
    assert losses[0] == losses[1]
