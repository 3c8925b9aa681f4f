"""What crosses between stages that are tensors of their own: their memory."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.distributed.build import CutForward
from blockpipe.errors import CrossingError

from .ranks import NEEDS_SCHEDULES

pytestmark = [pytest.mark.cpu("nothing of it is on a device"), NEEDS_SCHEDULES]


class Strides(nn.Module):
    """Computes by how its argument is in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.stride()[1] + 1)


def test_tensors_cross_with_the_order_of_their_memory() -> None:
    """As with ``channels_last``, also through a stage that only hands them on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.second, self.third = Strides(), Strides()

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(0):
                h = self.first(x).contiguous(memory_format=torch.channels_last)
            with bp.Block(1):
                k = self.second(h.sin())
            with bp.Block(2):
                y: Tensor = self.third(h) + k
                return y

    net, x = Net(), torch.randn(2, 2, 4, 4)
    cut = CutForward(net, (x,), {})
    given: tuple[Tensor, ...] = (x,)
    for stage in map(cut.module, range(3)):
        given = tuple(tensor.detach().requires_grad_() for tensor in given)
        given = stage(*given)
        assert all(tensor.is_contiguous() for tensor in given)
    assert given[0].equal(net(x))
    given[0].sum().backward()


class Views(nn.Module):
    """Returns its argument's halves, the second one apart or not."""

    def __init__(self, second: slice) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y[:, :2], y[:, self.second]


class Doubles(nn.Module):
    """Writes to its first argument."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(2) + y


class Writes(nn.Module):
    """Has its second stage write to one of two tensors."""

    def __init__(self, second: slice) -> None:
        super().__init__()
        self.views, self.doubles = Views(second), Doubles()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            a, b = self.views(x)
        with bp.Block(1):
            y: Tensor = self.doubles(a.detach(), b.detach())
            return y


def test_write_to_memory_of_two_tensors_is_refused_on_a_later_stage() -> None:
    """There they are apart; halves that are apart already may be written to."""
    x = torch.randn(2, 4)
    said = r"expected no write to memory that two tensors .* got one at .*test_cutting\.py"
    with pytest.raises(CrossingError, match=said), torch.no_grad():
        CutForward(Writes(slice(1, 3)), (x,), {})
    net = Writes(slice(2, 4))
    with torch.no_grad():
        cut = CutForward(net, (x,), {})
        first, last = cut.module(0), cut.module(1)
        assert last(*first(x))[0].equal(net(x))
