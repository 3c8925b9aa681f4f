"""Entries of one dictionary, an entry for each layer: what says that a layer's key is its own."""

import copy
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_trains_as_plain
from ..stage_devices import stages

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 32).view(8, 4)


class Net(nn.Module):
    """Four layers on two stages; each one is scaled by a running mean under a key."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.named = nn.ModuleDict({f"layer{i}": one for i, one in enumerate(self.layers)})
        self.means = {str(i): 0.0 for i in range(4)} | dict.fromkeys(self.named, 0.0)

    def scaled(self, key: str, h: Tensor) -> Tensor:
        self.means[key] = 0.5 * self.means[key] + 0.5 * h.detach().abs().mean().item()
        return h / (1 + self.means[key])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i // 2):
                x = layer(x).tanh()
        return x


class Children(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, (name, layer) in enumerate(self.layers.named_children()):
            with bp.Block(stage=i // 2):
                x = self.scaled(name, layer(x).tanh())
        return x


class Items(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, (name, layer) in enumerate(self.named.items()):
            with bp.Block(stage=i // 2):
                x = self.scaled(name, layer(x).tanh())
        return x


class Sorted(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, name in enumerate(sorted(self.named.keys())):
            with bp.Block(stage=i // 2):
                x = self.scaled(name, self.named[name](x).tanh())
        return x


class Kind(enum.Enum):
    FIRST, SECOND, THIRD, FOURTH = range(4)


@dataclasses.dataclass(frozen=True)
class Key:
    layer: int


class Enums(Net):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i // 2):
                for key in (Kind(i), Key(i)):
                    self.means.setdefault(key, 0.0)  # type: ignore[arg-type]
                    x = self.scaled(key, layer(x).tanh())  # type: ignore[arg-type]
        return x


class Layer(nn.Linear):
    def forward(self, x: Tensor, key: str, means: dict[str, float]) -> Tensor:  # type: ignore[override]
        h = super().forward(x).tanh()
        means[key] = 0.5 * means[key] + 0.5 * h.detach().abs().mean().item()
        return h / (1 + means[key])


class Given(Net):
    """Hands the key to the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i // 2):
                x = layer(x, f"layer{i}", means=self.means)
        return x


class Changing(Given):
    """Hands it another one in each forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.calls += 1
            x = self.layers[0](x, str(self.calls % 4), means=self.means)
        with bp.Block(stage=1):
            return self.layers[1](x, "3", means=self.means)


class Hook:
    """A hook that is an object."""

    def __init__(self, key: str, means: dict[str, float]) -> None:
        self.key, self.means = key, means

    def __call__(self, module: nn.Module, args: Any, h: Tensor) -> Tensor:
        mean = self.means[self.key] = 0.5 * self.means[self.key] + 0.5 * h.detach().mean().item()
        return h / (1 + mean)


def _hook(net: Net, key: str, module: nn.Module, args: Any, h: Tensor) -> Tensor:
    return net.scaled(key, h)


def _by_partial(net: Net, key: str) -> Callable[..., Tensor]:
    return functools.partial(_hook, net, key)


def _by_default(net: Net, key: str) -> Callable[..., Tensor]:
    means = net.means

    def hook(module: nn.Module, args: Any, h: Tensor, key: str = key) -> Tensor:
        means[key] = 0.5 * means[key] + 0.5 * h.detach().abs().mean().item()
        return h / (1 + means[key])

    return hook


def _by_object(net: Net, key: str) -> Callable[..., Tensor]:
    return Hook(key, net.means)


def _by_module(net: Net, key: str) -> Callable[..., Tensor]:
    keys = {one: name for name, one in net.named.items()}

    def hook(module: nn.Module, args: Any, h: Tensor) -> Tensor:
        net.means[keys[module]] = 0.5 * net.means[keys[module]] + 0.5 * h.detach().mean().item()
        return h / (1 + net.means[keys[module]])

    return hook


def _assert_trains(net: Net, plain: Net) -> None:
    assert_trains_as_plain(net, plain, X, Y, steps=3)
    for key, mean in plain.means.items():
        assert net.means[key] == pytest.approx(mean)


@pytest.mark.parametrize("kind", [Children, Items, Sorted, Given, Enums])
def test_each_layer_has_a_key_of_its_own(kind: type[Net]) -> None:
    """Attack 46: a key that a call, or a module's caller, gave was taken for one that data give."""
    net = kind()
    _assert_trains(net, copy.deepcopy(net))


@pytest.mark.parametrize("make", [_by_partial, _by_default, _by_object, _by_module])
def test_each_hook_has_a_key_of_its_own(make: Callable[[Net, str], Callable[..., Tensor]]) -> None:
    """Attack 46: they were taken for keys that the data give."""
    net = Net()
    plain = copy.deepcopy(net)
    for one in (net, plain):
        for key, layer in one.named.items():
            layer.register_forward_hook(make(one, key))
    _assert_trains(net, plain)


def test_a_key_that_a_caller_changes_is_anothers_as_well() -> None:
    """It is 3 in each fourth forward."""
    with pytest.raises(StateError, match="the forward changes a dict"):
        bp.Pipeline(Changing(), devices=stages(2), chunks=2).forward_backward(
            X, target=Y, loss_fn=mse_loss
        )


class Cycled(nn.Linear):
    """Each layer goes round numbers of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scales = itertools.cycle([1.0, 2.0, 0.5])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)


def test_each_layer_may_have_an_iterator_of_its_own() -> None:
    """Attack 47: the list that `cycle` fills was taken for one that another stage might fill."""
    net = bp.begin_blocks(nn.Sequential(Cycled(), nn.Tanh(), Cycled()), {"2": 1})
    plain = nn.Sequential(Cycled(), nn.Tanh(), Cycled())
    plain.load_state_dict(net.state_dict())
    assert_trains_as_plain(net, plain, X, Y)
