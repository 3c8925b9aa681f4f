"""Entries by the names of a mapping's methods, fields by index and by name, keys' texts in errors."""

from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ....alike import check_trains_alike
from ....parameter_sets import every_pair
from ....stage_devices import stages

KINDS: list[Callable[[], Any]] = [dict, OrderedDict, UserDict, Counter, lambda: defaultdict(int)]
KEYS = ["values", "keys", "items", "get", "copy", "pop", "update", "total"]


class Scales(nn.Module):
    """One stage counts in an entry, and the other one reads it."""

    def __init__(self, state: Any, key: Any, *, is_late: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.state, self.key, self.is_late = state, key, is_late
        self.state[key] = 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.is_late:
                h = h * (1 + self.state[self.key])
            else:
                self.state[self.key] = self.state[self.key] + 1
        with bp.Block(stage=1):
            h = self.b(h)
            if self.is_late:
                self.state[self.key] = self.state[self.key] + 1
                return h
            return h * self.state[self.key]


@every_pair(kind=KINDS, key=KEYS, is_late=[False, True])
def test_an_entry_of_a_methods_name_when_stages_share_it_is_refused(kind, key, is_late) -> None:
    """The method was taken for the entry, which never changed: other numbers, silently."""
    pipe = bp.Pipeline(Scales(kind(), key, is_late=is_late), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Caches(nn.Module):
    """Each stage has a cache of its own, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.caches = [{"keys": None, "values": None} for _ in range(2)]

    def _attend(self, number: int, h: Tensor) -> Tensor:
        cache = self.caches[number]
        cache["keys"], cache["values"] = h.tanh(), h.sigmoid()
        return h + cache["keys"] * cache["values"]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self._attend(0, self.a(x))
        with bp.Block(stage=1):
            return self._attend(1, self.b(h))


def test_a_cache_of_keys_and_values_when_each_stage_has_one_trains_as_plain() -> None:
    check_trains_alike(Caches())


def test_a_key_when_its_text_is_long_is_shortened_in_errors() -> None:
    """A module as a key filled the error with its whole text."""
    key = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    pipe = bp.Pipeline(Scales({}, key, is_late=False), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"entry Sequential\( \(0\): Linear.{1,60}… of a dict"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Kept(NamedTuple):
    """Its fields have indices and names."""

    label: str
    history: list[float]


class ByIndexAndName(Scales):
    def __init__(self) -> None:
        super().__init__({}, "k", is_late=False)
        self.kept = Kept("a", [1.0])

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.kept[1][0] = h.detach().abs().max().item()
        with bp.Block(stage=1):
            return self.b(h) * self.kept.history[0]


def test_a_field_when_one_stage_sets_it_by_index_and_one_reads_it_by_name_is_refused() -> None:
    pipe = bp.Pipeline(ByIndexAndName(), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match="the forward changes a list on hops"):
        pipe(torch.randn(4, 4))
