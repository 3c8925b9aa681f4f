"""Attributes with tensors that are no fields of a dataclass and no keys of a mapping."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import blockpipe as bp
from blockpipe.errors import MicrobatchError

from ..parity import assert_same_gradients
from ..stage_devices import assert_close, stages


@dataclass
class Out:
    mean: Tensor
    rows: Tensor

    @functools.cached_property
    def squares(self) -> Tensor:
        return self.mean.square().sum(1)


@dataclass
class Summed:
    rows: Tensor

    def __post_init__(self) -> None:
        self.squares = self.rows.square().sum(1)


class AttributesAsKeys(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Named(dict[str, Any]):
    squares: Tensor


def _cached(h: Tensor, rows: Tensor) -> Out:
    out = Out(h, rows)
    assert out.squares.dim() == 1  # as a loss of the model's own reads it
    return out


def _with_attribute(h: Tensor, rows: Tensor) -> Named:
    out = Named(rows=rows)
    out.squares = rows.square().sum(1)
    return out


class Net(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(4, 4), nn.Linear(4, 4), make

    def forward(self, x: Any) -> Any:
        with bp.Block(stage=0):
            h = self.a(x if isinstance(x, Tensor) else x.mean * x.squares[:, None]).tanh()
        with bp.Block(stage=1):
            return self.make(h, self.b(h))


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cached property": _cached,
    "set after init": lambda _, rows: Summed(rows),
    "attributes as keys": lambda _, rows: AttributesAsKeys(rows=rows, squares=rows.square().sum(1)),
    "attribute of a mapping": _with_attribute,
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_attributes_of_an_output_are_the_whole_batchs(make: Callable[..., Any]) -> None:
    """They were those of the first micro-batch, and a loss of them trained on it alone."""
    torch.manual_seed(0)
    plain = Net(make)
    torch.manual_seed(0)
    net = Net(make)
    x = torch.randn(7, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    for model in (plain, pipe):
        model(x).squares.mean().backward()
    assert_same_gradients(net, plain)
    assert_close(pipe(x).squares, plain(x).squares)


def test_attributes_of_an_argument_are_split_with_it() -> None:
    """Each micro-batch had the whole batch's, where they were asked for before the call."""
    net, x = Net(lambda _, rows: rows), torch.randn(6, 4)
    given = Out(x, x)
    assert given.squares.shape == (6,)
    wanted = net(given)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=6)
    assert_close(pipe(given), wanted)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda h, rows: {"h": h, "rows": rows}.values(), "a view of a mapping for output"),
        (lambda h, rows: iter([h, rows]), "an iterator or a view"),
        (
            lambda h, _: {"h": pack_padded_sequence(h[:, None], [1] * len(h), batch_first=True)},
            r"a PackedSequence for output\['h'\]",
        ),
    ],
    ids=["view", "iterator", "packed"],
)
def test_outputs_that_cannot_be_joined_are_refused(make: Callable[..., Any], match: str) -> None:
    """The first two were lists of one for each micro-batch, and the third one no sequence."""
    pipe = bp.Pipeline(Net(make), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(MicrobatchError, match=rf"{match}.*'output': None"):
        pipe(torch.randn(6, 4))
