"""Forwards that go several ways: one micro-batch may set what another one reads."""

import collections

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from .wild import by_name, raises_at, wilds


class Apart(nn.Module):
    """Wild micro-batches set what very wild ones read, and none does both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        self.table, self.scale, self.box = {"k": 1.0}, 1.0, collections.UserDict({"k": 1.0})
        self.register_buffer("mean", torch.zeros(4))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        at = int(x.max() / 50)
        with bp.Block(stage=0):
            by_name(at == 2, getattr(self, f"set_{self.kind}"))
            h = self.a(x)
        with bp.Block(stage=1):
            by_name(at > 2, getattr(self, f"read_{self.kind}"))
            return self.b(h)

    def set_entry(self) -> None:
        self.table["k"] = 2.0

    def read_entry(self) -> float:
        return self.table["k"]

    def set_attribute(self) -> None:
        self.scale = 2.0

    def read_attribute(self) -> float:
        return self.scale

    def set_container(self) -> None:
        self.box.update(k=2.0)

    def read_container(self) -> float:
        return self.box.get("k", 1.0)

    def set_buffer(self) -> None:
        self.mean.add_(1)

    def read_buffer(self) -> Tensor:
        return self.mean * 2

    def set_generator(self) -> None:
        torch.rand(1, generator=self.generator)

    read_generator = set_generator


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["entry", "attribute", "container", "buffer", "generator"])
def test_forwards_that_go_several_ways_are_judged_together(kind: str, schedule: str):
    """The one that sets is right, and so is the one that reads."""
    torch.manual_seed(0)
    both = wilds(1, 2)
    both[4] += 100
    net = Apart(kind)
    if kind == "generator":
        net.generator.manual_seed(0)
    raises_at(net, wilds(), both, match=r"hops \[0, 1\]|on hops \[1\]", schedule=schedule)


class ByTurns(nn.Module):
    """Of two forwards in a row, one sets what the other one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.n, self.m, self.table = 0, 0, {"k": 1.0}

    def keep(self) -> None:
        self.table["k"] = 1.0 + self.n

    def read(self) -> float:
        return self.table["k"]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.n += 1
            by_name(self.n % 2 == 1, self.keep)
            h = self.a(x)
        with bp.Block(stage=1):
            self.m += 1
            return self.b(h) * (by_name(self.m % 2 == 0, self.read) or 1.0)


def test_two_runs_of_a_recording_are_judged_together():
    raises_at(ByTurns(), wilds(), match=r"entry 'k' .*hops \[1\]")


class Counting(nn.Module):
    """Counts for wild data in a module that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.n = nn.Linear(4, 64), 0

    def count(self) -> int:
        self.n += 1
        return self.n

    def forward(self, h: Tensor) -> Tensor:
        h = self.wide(h * 0.1).tanh().exp()
        return h / (1 + (by_name(bool(h.isnan().any()) or self.is_wild(h), self.count) or 0))

    def is_wild(self, h: Tensor) -> bool:
        return bool(h.max() > 2.7)


def test_a_way_that_recomputation_would_not_bear_is_refused():
    """It counts once more, and later micro-batches go on from there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.middle, self.b = nn.Linear(4, 4), Counting(), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.middle(self.a(x))
            with bp.Block(stage=1):
                return self.b(h)

    raises_at(Net(), wilds() * 0.1, wilds(2), match="recomput", checkpoint="always")
