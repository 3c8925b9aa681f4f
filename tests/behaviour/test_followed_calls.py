"""Ways in which the code of a hook may call what reads a plain value of the forward."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Scales(nn.Module):
    """Scales by the number of a model."""

    def __init__(self, net: "Net") -> None:
        super().__init__()
        self.nets = [net]

    def forward(self, g: Tensor) -> Tensor:
        return g * self.nets[0].level


class Entered:
    def __init__(self, net: "Net") -> None:
        self.net = net

    def __enter__(self) -> float:
        return self.net.level

    def __exit__(self, *_: object) -> None:
        pass


class Net(nn.Module):
    """Sets a number on its first stage; a hook reads it."""

    def __init__(self, hook: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.level, self.hook = nn.Linear(4, 4), nn.Linear(4, 4), 1.0, hook
        self.terms = nn.ModuleDict({"scales": Scales(self)})
        self.both = nn.Sequential(nn.Identity(), Scales(self))
        self.calls = [self.scaled]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.level = h.detach().mean().item()
            h.register_hook(functools.partial(self.hook, self))
        with bp.Block(stage=1):
            return self.b(h)

    def scaled(self, g: Tensor) -> Tensor:
        return g * self.level

    def same(self, g: Tensor) -> Tensor:
        return g

    @functools.singledispatchmethod
    def by_class(self, g: Any) -> Any:
        return g * self.level


def _by_name(net: Net, g: Tensor) -> Tensor:
    return getattr(net, "scaled")(g)  # noqa: B009


def _by_another_name(net: Net, g: Tensor) -> Tensor:
    call = net.scaled
    return call(g)


def _of_two(net: Net, g: Tensor) -> Tensor:
    call, times = net.scaled, 1
    return call(g) * times


def _of_a_list(net: Net, g: Tensor) -> Tensor:
    calls = [net.scaled]
    return calls[0](g)


def _of_a_table(net: Net, g: Tensor) -> Tensor:
    return {"scaled": net.scaled}["scaled"](g)


def _of_a_loop(net: Net, g: Tensor) -> Tensor:
    for call in (net.scaled,):
        g = call(g)
    return g


def _of_a_chain(net: Net, g: Tensor) -> Tensor:
    for call in itertools.chain(net.calls, ()):
        g = call(g)
    return g


def _of_a_zip(net: Net, g: Tensor) -> Tensor:
    for _, call in zip(range(1), net.calls, strict=True):
        g = call(g)
    return g


def _if_it_is_there(net: Net, g: Tensor) -> Tensor:
    return (net.scaled if g.ndim else net.forward)(g)


def _or_another(net: Net, g: Tensor) -> Tensor:
    return (None or net.scaled)(g)


def _of_a_generator(net: Net, g: Tensor) -> Tensor:
    found: Iterator[Tensor] = (call(g) for call in [net.scaled])
    return sum(found, torch.zeros(()))


def _of_module_dict(net: Net, g: Tensor) -> Tensor:
    for term in net.terms.values():
        g = term(g)
    return g


def _of_sequential(net: Net, g: Tensor) -> Tensor:
    return net.both(g)


def _by_its_class(net: Net, g: Tensor) -> Tensor:
    return net.by_class(g)


def _entered(net: Net, g: Tensor) -> Tensor:
    with Entered(net) as scale:
        return g * scale


WAYS = [
    *(_by_name, _by_another_name, _of_two, _of_a_list, _of_a_table, _of_a_loop, _of_a_chain),
    *(_of_a_zip, _if_it_is_there, _or_another, _of_a_generator, _of_module_dict),
    *(_of_sequential, _by_its_class, _entered),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_in_a_hook_is_followed(way: Callable[[Net, Tensor], Tensor]):
    """Attack 25: the hook of another micro-batch's backward read this one's number."""
    pipe = bp.Pipeline(Net(way), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="attribute 'level' of the model"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def _names_no_value(net: Net, g: Tensor) -> Tensor:
    calls = [net.same, net.a]
    return calls[0](g)


def test_a_hook_that_calls_what_reads_no_value_is_fine():
    pipe = bp.Pipeline(Net(_names_no_value), devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
