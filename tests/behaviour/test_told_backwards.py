"""What a step tells of code that autograd calls, and of which no recording knew."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_trains_as_plain
from ..stage_devices import stages

X, Y = torch.linspace(0, 0.4, 32).view(8, 4), torch.ones(8, 4)


class Owning(nn.Module):
    """Sets an attribute of its own in each forward, which the backward of what a branch hands over
    reads in ways that no source tells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = 1.0
        self.again = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.scale = 1 + float(h.detach().abs().mean())
            if float(x.detach().max()) > 0.5:
                h = self.changed(h)
            return self.b(h)

    def changed(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class ByClosure(Owning):
    def changed(self, h: Tensor) -> Tensor:
        net = self

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(context: Any, gradient: Tensor) -> Any:
                return gradient * net.scale

        return Own.apply(h)  # type: ignore[no-any-return]


class ByReduce(Owning):
    def changed(self, h: Tensor) -> Tensor:
        hooks = [lambda g: g * self.scale]
        functools.reduce(lambda _, hook: h.register_hook(hook), hooks, None)  # type: ignore
        return h


class Sets(Owning):
    """The hook sets what each forward reads."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            h = h * self.scale
            if float(x.detach().max()) > 0.5:
                hooks = {True: self.note}
                any(h.register_hook(hook) for hook in hooks.values())
            return self.b(h)

    def note(self, gradient: Tensor) -> None:
        self.scale = 1 + float(gradient.abs().mean())


class ByPartialCheckpoint(Owning):
    def changed(self, h: Tensor) -> Tensor:
        return self.again(self.inner.__call__, h) * self.scale  # type: ignore[no-any-return]


class OfNorm(Owning):
    """Nothing but the branch changes anything, and that twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            if float(x.detach().max()) > 0.5:
                h = self.again(self.norm, h)
            return self.b(h)


@pytest.mark.parametrize("kind", [ByClosure, ByReduce, Sets, ByPartialCheckpoint, OfNorm])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_tells_what_no_source_has_told(kind: type[Owning], schedule: str) -> None:
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=4, schedule=schedule)
    pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"in a backward|torch.utils.checkpoint began"):
        pipe.forward_backward(X + 0.4, target=Y, loss_fn=mse_loss)


class Unchanging(Owning):
    """Such a checkpoint harms nothing where forwards change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            if float(x.detach().max()) > 0.5:
                h = self.again(self.inner, h)
            return self.b(h)


def test_a_checkpoint_in_a_branch_trains_where_nothing_changes() -> None:
    net, plain = Unchanging(), Unchanging()
    plain.load_state_dict(net.state_dict())
    assert_trains_as_plain(net, plain, [X, X + 0.4, X], Y)
