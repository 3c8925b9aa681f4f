"""Objects that share one ``__dict__``: what one has set, the others have."""

import argparse
import dataclasses
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Shared:
    """All of its objects have one state, as in the pattern that is called Borg."""

    state: ClassVar[dict[str, Any]] = {"n": 1}

    def __init__(self) -> None:
        self.__dict__ = self.state

    def count(self) -> None:
        self.n += 1

    def counted(self) -> int:
        found: int = self.n
        return found


class Net(nn.Module):
    """Two such objects, of which each stage uses one, or makes one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.one, self.other = Shared(), Shared()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.how == "held":
                self.one.count()
            else:
                made = Shared()
                made.n += 1
        with bp.Block(stage=1):
            if self.how == "held":
                return self.b(h) * self.other.counted()
            if self.how == "made":
                another = Shared()
                return self.b(h) * another.n
            return self.b(h) * Shared().n


@pytest.mark.parametrize("how", ["held", "made", "at once"])
def test_objects_with_one_dict_are_one_place(how: str) -> None:
    """They were two places, one of which nobody set."""
    pipe = bp.Pipeline(Net(how), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"'n' of a"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)
    assert Shared.state == {"n": 1}


class Counts:
    """A class that counts."""

    n: ClassVar[int] = 1


class Inherits(Counts):
    """It has the count, too."""

    def counted(self) -> int:
        return self.n


class Whole(argparse.Namespace):
    """An object of one's own, with methods of a library's that read all of it."""

    total: int
    items: list[float]


@dataclasses.dataclass
class Data:
    """Its text has all of it, too."""

    items: list[float]


def _of_variable(net: Any) -> float:
    made = Inherits()
    return float(made.n)


READS: dict[str, tuple[Any, Any]] = {
    "a variable": (_of_variable, "Counts.n"),
    "at once": (lambda net: Inherits().counted(), "Counts.n"),
    "its class": (lambda net: type(Inherits()).n, "Counts.n"),
    "a library's method": (
        lambda net: dict(net.whole._get_kwargs())["total"],
        "'total' of a Whole",
    ),
    "a text": (lambda net: len(str(net.data)), "a list"),
    "bytes": (lambda net: len(pickle.dumps(net.data)), "a list"),
}


class Reads(nn.Module):
    """The first stage changes all of these; the second one reads one."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read
        self.whole, self.data = Whole(total=1, items=[1.0]), Data([1.0])

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            Counts.n += 1
            self.whole.total += 1
            self.data.items.append(1.0)
        with bp.Block(stage=1):
            return self.b(h) * float(self.read(self))


@pytest.mark.parametrize("how", READS)
def test_what_an_object_has_is_read_without_its_name(how: str) -> None:
    """Attributes of a class by an object that inherits them, and all that an object has."""
    read, what = READS[how]
    pipe = bp.Pipeline(Reads(read), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=what):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)
