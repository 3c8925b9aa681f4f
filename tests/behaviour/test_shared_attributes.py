"""Objects that share one ``__dict__``: what one has set, the others have."""

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
