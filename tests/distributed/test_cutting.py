"""What crosses: its memory, and what is asked about the arguments before a step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.batches.microbatch import Microbatch
from blockpipe.distributed.build import CutForward
from blockpipe.errors import CrossingError, RouteError, StateError

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


class Selects(nn.Module):
    """Sends the rows that a mask leaves to the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with bp.Block(0):
            h = self.norm(self.first(x))[mask]
        with bp.Block(1):
            return self.second(h)


def test_a_size_that_crosses_when_the_arguments_give_another_is_refused_before_the_step() -> None:
    """And not by torch's engine in its middle; no module is called for that."""
    net, x = Selects(), torch.randn(4, 4)
    mask = torch.tensor([True, True, False, True])
    asked = CutForward(net, (x, mask), {}).questions()
    assert asked is not None
    assert not asked.run(asked.arguments(x, mask.flip(0)))
    with pytest.raises(RouteError, match=r"expected torch.Size\(\[3, 4\]\) .*got .*\[1, 4\]"):
        asked.run(asked.arguments(x, mask.logical_not()))
    assert net.norm.num_batches_tracked == 0


class Counter(nn.Linear):
    """Asks a buffer for a number."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("n", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.n.item()


def test_a_module_that_asks_a_buffer_for_a_number_is_taped_for_real() -> None:
    """A fake tensor has none."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), Counter()), {"1": 1})
    x = torch.randn(3, 4)
    first, last = CutForward(net, (x,), {}).module(0), CutForward(net, (x,), {}).module(1)
    assert torch.equal(last(*first(x))[0], net(x))


_AUX: list[Tensor] = []
_TABLE: dict[str, Tensor] = {}


class Leaves(nn.Linear):
    """Leaves a tensor in a global list, and in a global dictionary."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        _AUX.append(y.detach().mean())
        _TABLE["aux"] = y.detach().mean()
        return y


@pytest.mark.parametrize(
    "loss_fn", [lambda y: y.sum() + sum(_AUX), lambda y: y.sum() + _TABLE.get("aux", 0.0)]
)
def test_a_loss_that_reads_tensors_which_another_stage_has_left_is_refused(
    loss_fn: Callable[[Tensor], Tensor],
) -> None:
    """In the last stage's process they are not there."""
    net = bp.begin_blocks(nn.Sequential(Leaves(4, 4), nn.Linear(4, 4)), {"1": 1})
    x = torch.randn(3, 4)
    cut, microbatch = CutForward(net, (x,), {}), Microbatch((x,), {}, None, 3)
    cut.check_loss(microbatch, torch.sum)
    with pytest.raises(StateError, match="keeps a tensor, and the loss reads it .*return it with"):
        cut.check_loss(microbatch, loss_fn)
