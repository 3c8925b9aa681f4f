"""Reads of plain values through keys, indices and names that an expression computes."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....alike import check_trains_alike
from ....stage_devices import stages


class Layer(nn.Linear):
    last = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).tanh()
        self.last = h.detach().norm().item()
        return h


class Layers(nn.Module):
    """Each layer leaves its norm in several places, and one stage reads it in one of them."""

    def __init__(self, read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self.read, self.stats = read, {}

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                x = layer(x / self.read(self, i, x)) if self.read else layer(x)
                norm = x.detach().norm().item()
                self.stats[f"layer{i}"] = self.stats[i] = self.stats[x.shape, i] = norm
                self.stats[id(layer)] = norm
                setattr(self, f"norm_{i}", norm)
        return x


READS = {
    "index": lambda net, i, x: net.layers[i - 1].last if i else 1.0,
    "length": lambda net, i, x: 1.0 if i else net.layers[len(net.layers) - 1].last,
    "submodule": lambda net, i, x: net.get_submodule(f"layers.{i - 1}").last if i else 1.0,
    "list": lambda net, i, x: list(net.layers)[i - 1].last if i else 1.0,
    "next": lambda net, i, x: next(iter(net.layers)).last if i else 1.0,
    "number": lambda net, i, x: net.stats[max(i - 1, 0)] if i else 1.0,
    "f-string": lambda net, i, x: net.stats[f"layer{i - 1}"] if i else 1.0,
    "format": lambda net, i, x: net.stats["layer{}".format(i - 1)] if i else 1.0,  # noqa: UP032
    "percent": lambda net, i, x: net.stats["layer%d" % (i - 1)] if i else 1.0,  # noqa: UP031
    "chain": lambda net, i, x: net.layers[0 < i - 1 < 2].last if i else 1.0,
    "member": lambda net, i, x: net.layers[i not in (1, 2)].last if i else 1.0,
    "or": lambda net, i, x: net.layers[(i - 1) or 0].last if i else 1.0,
    "and": lambda net, i, x: net.layers[i and i - 1].last if i else 1.0,
    "slice": lambda net, i, x: net.layers[: i + 1][i - 1].last if i else 1.0,
    "list's slice": lambda net, i, x: [*net.layers][i - 1 :][0].last if i else 1.0,
    "size": lambda net, i, x: net.layers[i - x.size(1) // 4].last if i else 1.0,
    "copy": lambda net, i, x: copy.copy(net.layers[i - 1]).last if i else 1.0,
    "dict": lambda net, i, x: dict(net.stats)[i - 1] if i else 1.0,
    "choice": lambda net, i, x: net.stats[0 if i > 0 else 1] if i else 1.0,
    "shape": lambda net, i, x: net.stats[x.shape, i - 1] if i else 1.0,
    "identity": lambda net, i, x: net.stats[id(net.layers[i - 1])] if i else 1.0,
    "name": lambda net, i, x: getattr(net, f"norm_{i - 1}") if i else 1.0,
    "unknown": lambda net, i, x: net.stats[divmod(i, 2)[0]] if i else 1.0,
    "walrus": lambda net, i, x: net.stats[(i := i - 1)] if i else 1.0,
}


@pytest.mark.parametrize("read", READS)
def test_a_value_when_it_is_read_by_a_computed_key_is_refused(read: str) -> None:
    """The expression was not evaluated again, and its value not known: other numbers, silently."""
    pipe = bp.Pipeline(Layers(READS[read]), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


class Keyed(Layers):
    """Reads settings by computed keys, and on each stage what that stage has set itself."""

    def __init__(self) -> None:
        super().__init__(None)
        self.settings = {"scale0": 0.5, "scale1": 0.25}

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                x = self.layers[i - 0](x) * self.settings[f"scale{divmod(i, 2)[1]}"]
                self.stats[f"layer{i}"] = x.detach().norm().item()
                self.stats[id(layer)] = layer.last
                x = x / self.stats[f"layer{i}"] / self.stats[id(layer)]
        return x


def test_computed_keys_when_each_stage_has_its_own_train_as_plain() -> None:
    check_trains_alike(Keyed())
