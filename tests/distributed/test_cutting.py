"""What crosses, and what is asked about the arguments before a step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.batches.microbatch import Microbatch
from blockpipe.distributed.build import CutForward
from blockpipe.errors import RouteError, StateError


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
