"""Code that a training loop replaces or adds between steps, where no name in the forward's code leads
to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Scale:
    """An object whose methods Python's syntax calls."""

    def __call__(self, h: Tensor) -> Tensor:
        return h

    def __enter__(self) -> float:
        return 1.0

    def __exit__(self, *failure: object) -> None:
        pass

    def __mul__(self, other: Tensor) -> Tensor:
        return other

    def __getitem__(self, key: int) -> float:
        return 1.0


class Counts(nn.Module):
    """The first stage counts; the second one uses an object."""

    def __init__(self, use: Callable[[Scale, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.n, self.use = nn.Linear(4, 4), nn.Linear(4, 4), 1, use
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
        with bp.Block(stage=1):
            out: Tensor = self.b(h)
            return out if self.use is None else self.use(self.scale, out)


def _enters(scale: Scale, h: Tensor) -> Tensor:
    with scale as factor:
        return h * factor


USES: dict[str, Callable[[Scale, Tensor], Tensor]] = {
    "__call__": lambda scale, h: scale(h),
    "__enter__": _enters,
    "__mul__": lambda scale, h: scale * h,
    "__getitem__": lambda scale, h: h * scale[0],
}


@pytest.mark.parametrize("name", USES)
def test_a_special_method_that_is_replaced_between_steps_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary methods were looked at, these were not."""
    net, x, y = Counts(USES[name]), torch.randn(8, 4), torch.randn(8, 4)

    def counting(scale: Scale, *given: Any) -> Any:
        return given[0] * net.n if given and isinstance(given[0], Tensor) else net.n

    with bp.Pipeline(net, devices=stages(2), chunks=4) as pipe:
        pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        monkeypatch.setattr(Scale, name, counting)
        with pytest.raises(StateError, match="attribute 'n' of the model"):
            pipe.forward_backward(x, target=y, loss_fn=mse_loss)


class Base(nn.Module):
    """A layer of a loss."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)


class Outer(nn.Module):
    """A loss with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Base()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.base(output, target)
        return found


def test_a_hook_that_comes_to_a_layer_of_the_loss_is_noticed() -> None:
    """Hooks of the model's modules were."""
    net, loss, x, y = Counts(), Outer(), torch.randn(8, 4), torch.randn(8, 4)
    with bp.Pipeline(net, devices=stages(2), chunks=4) as pipe:
        pipe.forward_backward(x, target=y, loss_fn=loss)
        loss.base.register_forward_hook(lambda module, given, found: found * net.n)
        with pytest.raises(StateError, match="attribute 'n' of the model"):
            pipe.forward_backward(x, target=y, loss_fn=loss)
