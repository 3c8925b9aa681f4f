"""Branches by what kind a value is, which a function, or another branch, chooses by the data."""

import copy
import enum
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_trains_as_plain
from ....stage_devices import stages
from .tailed import CALM, Tailed, Y


class Kind(enum.Enum):
    CALM = 0
    WILD = 1


class Packed(NamedTuple):
    x: Tensor
    mask: Tensor | None


class Scaled:
    """An object that is called."""

    def __init__(self, table: dict[str, float]) -> None:
        self.table, self.mask = table, None

    def __call__(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        return h if mask is None else h * self.table["scale"]


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor | None:
        return None if x.max() < 2 else x > 2


class Net(Tailed):
    """The first stage sets an entry, which the second one reads for some data."""

    def __init__(self, tail: Callable[["Net", Tensor, Tensor], Tensor]) -> None:
        super().__init__(tail)
        self.masks, self.flags = Masks(), dict[str, bool]()

    def outlier(self, x: Tensor) -> float | None:
        most = x.max().item()
        return most if most > 2 else None

    def found(self, x: Tensor) -> Tensor | None:
        if x.max() > 2:
            return x > 2
        return None

    def fallen(self, x: Tensor) -> Any:  # noqa: RET503 - and None, by its end
        if x.max() > 2:
            return x

    def one_if(self, flag: bool) -> int | None:
        return 1 if flag else None

    def is_wild(self, x: Tensor) -> bool:
        return bool(x.max() > 2)

    def name_of(self, x: Tensor) -> str:
        return "wild" if x.max() > 2 else "calm"

    def scaled(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            h = h * self.table["scale"]
        return h

    @property
    def part(self) -> Scaled:
        return Scaled(self.table)


def early(net: Net, x: Tensor, h: Tensor) -> Tensor:
    most = net.outlier(x)
    if most is None:
        return h
    return h * net.table["scale"]


def ternary(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.found(x)
    return h if mask is None else h * net.table["scale"]


def falls_off(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.fallen(x)
    if mask is not None and net.training:
        h = h * net.table["scale"]
    return h


def by_variable(net: Net, x: Tensor, h: Tensor) -> Tensor:
    has_one = net.found(x) is not None
    if has_one:
        h = h * net.table["scale"]
    return h


def by_layer(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.masks(x)
    if mask is not None:
        h = h * net.table["scale"]
    return h


def argument(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.scaled(h, net.found(x))


def keyword(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.found(x) if x.max() > 2 else None
    return net.scaled(h, mask=mask)


def called_object(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return net.part(h, net.found(x))


def named_tuple(net: Net, x: Tensor, h: Tensor) -> Tensor:
    packed = Packed(x, net.found(x))
    if packed.mask is not None:
        h = h * net.table["scale"]
    return h


def identity(net: Net, x: Tensor, h: Tensor) -> Tensor:
    is_wild = net.is_wild(x)
    if is_wild is True:
        h = h * net.table["scale"]
    return h


def layer(net: Net, x: Tensor, h: Tensor) -> Tensor:
    chosen = net.second if net.is_wild(x) else net.first
    if chosen is net.second:
        h = h * net.table["scale"]
    return h


def isinstance_of(net: Net, x: Tensor, h: Tensor) -> Tensor:
    most = net.outlier(x)
    if isinstance(most, float):
        h = h * net.table["scale"]
    return h


def type_of(net: Net, x: Tensor, h: Tensor) -> Tensor:
    most = net.outlier(x)
    if type(most) is float:
        h = h * net.table["scale"]
    return h


def hasattr_of(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.found(x)
    if hasattr(mask, "shape"):
        h = h * net.table["scale"]
    return h


def dtype(net: Net, x: Tensor, h: Tensor) -> Tensor:
    other = h.clone()
    if x.max() > 2:
        other = other.double()
    if other.dtype == torch.float64:
        h = h * net.table["scale"]
    return h


def dims(net: Net, x: Tensor, h: Tensor) -> Tensor:
    other = h[None] if net.is_wild(x) else h
    if other.dim() == 3:
        h = h * net.table["scale"]
    return h


def needs_gradient(net: Net, x: Tensor, h: Tensor) -> Tensor:
    other = h.detach() if x.max() > 2 else h
    if not other.requires_grad:
        h = h * net.table["scale"]
    return h


def rows(net: Net, x: Tensor, h: Tensor) -> Tensor:
    other = torch.cat([h] + [h] * net.is_wild(x))
    if other.shape[0] > h.shape[0]:
        h = h * net.table["scale"]
    return h


def cut(net: Net, x: Tensor, h: Tensor) -> Tensor:
    other = h[:1] if x.max() > 2 else h
    if len(other) == 1:
        h = h * net.table["scale"]
    return h


def entry(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.flags["wild"] = net.is_wild(x)
    if net.flags.get("wild"):
        h = h * net.table["scale"]
    return h


def looked_up(net: Net, x: Tensor, h: Tensor) -> Tensor:
    known = {"wild": 1}.get(net.name_of(x))
    if known is not None:
        h = h * net.table["scale"]
    return h


def matched(net: Net, x: Tensor, h: Tensor) -> Tensor:
    match = re.match("w", net.name_of(x))
    if match is not None:
        h = h * net.table["scale"]
    return h


def first_of(net: Net, x: Tensor, h: Tensor) -> Tensor:
    most = max((value for value in x.flatten().tolist() if value > 2), default=None)
    if most is not None:
        h = h * net.table["scale"]
    return h


def given_a_number(net: Net, x: Tensor, h: Tensor) -> Tensor:
    found = net.one_if(bool(x.max() > 2))
    if found is not None:
        h = h * net.table["scale"]
    return h


def enum_member(net: Net, x: Tensor, h: Tensor) -> Tensor:
    kind = Kind(int(x.max() > 2))
    if kind is Kind.WILD:
        h = h * net.table["scale"]
    return h


def autocast(net: Net, x: Tensor, h: Tensor) -> Tensor:
    with torch.autocast(h.device.type, torch.bfloat16, enabled=bool(x.max() < 2)):
        other = net.second(h)
    if other.dtype == torch.float32:
        h = h * net.table["scale"]
    return h


def grad_mode(net: Net, x: Tensor, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(bool(x.max() < 2)):
        other = h * 2
    if not other.requires_grad:
        h = h * net.table["scale"]
    return h


def longest(net: Net, x: Tensor, h: Tensor) -> Tensor:
    lengths = 1 + (x.mean(1) > 1).long()
    mask = torch.arange(lengths.max().item(), device=h.device)[None] < lengths[:, None]
    if mask.shape[1] > 1:
        h = h * net.table["scale"]
    return h


def packed_rows(net: Net, x: Tensor, h: Tensor) -> Tensor:
    lengths = (1 + (x.mean(1) > 1).long()).cpu()
    both = h[:, None].expand(-1, 2, -1)
    packed = pack_padded_sequence(both, lengths, batch_first=True, enforce_sorted=False)
    if packed.data.shape[0] > 2:
        h = h * net.table["scale"]
    return h


def filtered(net: Net, x: Tensor, h: Tensor) -> Tensor:
    rows = torch.cat([h, *filter(lambda row: row.max() > 2, x.split(1))])
    if rows.shape[0] > h.shape[0]:
        h = h * net.table["scale"]
    return h


FORMS = (
    *(early, ternary, falls_off, by_variable, by_layer, argument, keyword, called_object),
    *(named_tuple, identity, layer, isinstance_of, type_of, hasattr_of, dtype, dims),
    *(needs_gradient, rows, cut, entry, looked_up, matched, first_of, given_a_number, enum_member),
    *(autocast, grad_mode, longest, packed_rows, filtered),
)


@pytest.mark.parametrize("tail", FORMS)
def test_a_branch_by_a_kind_that_data_choose_counts(
    tail: Callable[[Net, Tensor, Tensor], Tensor],
) -> None:
    pipe = bp.Pipeline(Net(tail), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"entry 'scale'"):
        pipe.forward_backward(CALM, target=Y, loss_fn=mse_loss)


def optional(net: Net, x: Tensor, h: Tensor) -> Tensor:
    assert x.max() < 100
    return net.scaled(net.scaled(h, None), mask=None) if isinstance(h, Tensor) else h


def of_one_kind(net: Net, x: Tensor, h: Tensor) -> Tensor:
    most = Packed(x.abs().max(), None)
    if isinstance(h, tuple) or most is None or net.second is None:
        h = h * net.table["scale"]
    return h


def of_an_option(net: Net, x: Tensor, h: Tensor) -> Tensor:
    mask = net.found(x)
    if not net.training and mask is not None:
        h = h * net.table["scale"]
    return h


@pytest.mark.parametrize("tail", [optional, of_one_kind, of_an_option])
def test_a_branch_by_a_kind_that_no_data_choose_does_not(
    tail: Callable[[Net, Tensor, Tensor], Tensor],
) -> None:
    net = Net(tail)
    plain = copy.deepcopy(net)
    assert_trains_as_plain(net, plain, [CALM, CALM * 4], Y)


class Bank:
    """Rows that it has seen."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, 4)

    def push(self, h: Tensor) -> None:
        self.rows = torch.cat([self.rows, h.detach()])[-6:]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_full(self) -> bool:
        return self.rows.shape[0] == 6


class Growing(nn.Module):
    """Its second stage reads an entry as soon as it has seen enough."""

    def __init__(self, tail: Callable[["Growing", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self._tail = nn.Linear(4, 4), nn.Linear(4, 4), tail
        self.table, self.bank, self.seen = {"scale": 1.0}, Bank(), list[Tensor]()
        self.rows: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
            self.table["scale"] *= 0.9
        with bp.Block(stage=1):
            return self._tail(self, self.second(h))


def by_length(net: Growing, h: Tensor) -> Tensor:
    net.bank.push(h)
    return h * net.table["scale"] if len(net.bank) == 6 else h


def by_property(net: Growing, h: Tensor) -> Tensor:
    net.bank.push(h)
    return h * net.table["scale"] if net.bank.is_full else h


def by_local(net: Growing, h: Tensor) -> Tensor:
    rows = h if net.rows is None else torch.cat([net.rows, h])
    if rows.shape[0] > 6:
        rows = rows[-6:] * net.table["scale"]
    net.rows = rows.detach()
    return h + rows.mean(0)


def by_stack(net: Growing, h: Tensor) -> Tensor:
    net.seen.append(h.detach().mean())
    seen = torch.stack(net.seen)
    return h * net.table["scale"] if seen.shape[0] > 5 else h


@pytest.mark.parametrize("tail", [by_length, by_property, by_local, by_stack])
def test_a_size_that_forwards_make_larger_counts(tail: Callable[[Growing, Tensor], Tensor]) -> None:
    pipe = bp.Pipeline(Growing(tail), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"entry 'scale'"):
        pipe.forward_backward(CALM, target=Y, loss_fn=mse_loss)
