"""What a forward asks of another module's forward, in whose place a stand-in is."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import assert_close, stages


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Scaled, and zero where the mask says so."""
        h = self.layer(x) * scale
        return h if mask is None else h.masked_fill(~mask[:, None], 0)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def _by_signature(layer: nn.Module) -> list[str]:
    return [*inspect.signature(layer.forward).parameters]


def _by_names(layer: nn.Module) -> list[str]:
    code = layer.forward.__code__
    return [*code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]]


def _by_defaults(layer: nn.Module) -> list[str]:
    return ["mask"] if layer.forward.__defaults__ else []


def _by_function(layer: nn.Module) -> list[str]:
    function = getattr(layer.forward, "__func__", None)
    return ["mask", "scale"] if function is Masked.forward else []


def _by_owner(layer: nn.Module) -> list[str]:
    owner: Any = layer.forward.__self__
    return ["mask"] if isinstance(owner, Masked) and owner is layer else []


def _by_name(layer: nn.Module) -> list[str]:
    return ["mask"] if layer.forward.__qualname__ == "Masked.forward" else []


class Net(nn.Module):
    """Passes each layer what its forward takes."""

    def __init__(self, asks: Callable[[nn.Module], list[str]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), Plain(), Masked(), Plain()])
        self.asks = asks

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for index, layer in enumerate(self.layers):
            with bp.Block(stage=index // 2):
                taken = self.asks(layer)
                x = layer(x, **{name: one for name, one in options.items() if name in taken})
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
@pytest.mark.parametrize(
    "asks", [_by_signature, _by_names, _by_defaults, _by_function, _by_owner, _by_name]
)
def test_a_forward_may_ask_what_another_one_takes(asks, schedule: str) -> None:
    """The signature was that of any function, so that the mask was left out without a word."""
    net, x = Net(asks), torch.randn(8, 4)
    options = {"mask": torch.rand(8) > 0.5}
    with torch.no_grad():
        expected = net(x, **options)
        pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule=schedule)
        assert_close(pipe(x, **options), expected)
