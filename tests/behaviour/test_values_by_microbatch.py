"""Plain values that follow from the index of the micro-batch, which a recording has none of."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..stage_devices import stages


class Direct(nn.Module):
    """Sets a value on stage 0 that stage 1 reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.value = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def set(self) -> None:
        self.value = bp.current_microbatch()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.set()
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x) * (1 + (self.value or 0))


class InitiallyNone(Direct):
    def __init__(self) -> None:
        super().__init__()
        self.value = None


class ByALocal(Direct):
    def set(self) -> None:
        index = bp.current_microbatch()
        self.value = index or 0


class ByABranch(Direct):
    def set(self) -> None:
        if bp.current_microbatch() == 0:
            self.value += 1


@pytest.mark.parametrize("kind", [Direct, InitiallyNone, ByALocal, ByABranch])
def test_a_value_of_the_index_that_another_stage_reads_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(StateError, match="changes attribute 'value' of the model on hops"):
        bp.Pipeline(kind(), devices=stages(2), chunks=4)(torch.randn(8, 4))


def test_a_value_of_the_index_that_its_own_stage_reads_is_fine() -> None:
    class Own(Direct):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                self.set()
                x = self.a(x) * (1 + (self.value or 0))
            with bp.Block(stage=1):
                return self.b(x)

    net = Own()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.ones(8, 4)
    for _ in range(2):
        y = pipe(x)
    factors = (1 + torch.arange(4.0)).repeat_interleave(2)[:, None]
    expected = net.b.cpu()(net.a.cpu()(x) * factors)
    torch.testing.assert_close(y.cpu(), expected)
