"""What a forward returns of what another stage has left."""

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...stage_devices import assert_close, stages


class Encoder(nn.Module):
    """Leaves its weights on itself, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.layer(x).softmax(-1)
        return x * self.weights


class Returns(nn.Module):
    """Returns what the first stage has left, behind the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Encoder(), Encoder()

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        with bp.Block(stage=0):
            x = self.a(x)
        with bp.Block(stage=1):
            return {"h": self.b(x), "first": self.a.weights}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_an_output_that_another_stage_has_left_is_its_own_or_refused(
    schedule: str, inference: bool
):
    """Attack 22: to return it is no operation, so that nobody looked whose it was: outputs were
    those of other micro-batches, from the second call on."""
    net, x = Returns(), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    was_right = 0
    for _ in range(4):
        with torch.inference_mode(inference):
            try:
                found = pipe(x)
            except StateError as error:
                assert "belongs to micro-batch" in str(error)
                assert schedule != "sequential"
                continue
        was_right += 1
        with torch.no_grad():
            expected = x.to(found["first"].device) @ net.a.layer.weight.to(found["first"].device).T
            expected = (expected + net.a.layer.bias.to(expected.device)).softmax(-1)
        assert_close(found["first"].detach(), expected)
    assert was_right == 4 or schedule != "sequential"


class Stores(nn.Module):
    """Puts what the first stage has left into a list, an attribute, or a hook's default."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.left = h.detach()
        with bp.Block(stage=1):
            return getattr(self, self.how)(self.b(h))

    def append(self, h: Tensor) -> Tensor:
        self.kept.append(self.left)
        return h

    def in_tuple(self, h: Tensor) -> Tensor:
        self.kept.append((len(self.kept), self.left))
        return h

    def assign(self, h: Tensor) -> Tensor:
        self.last = self.left
        return h

    def hook(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient, left=self.left: gradient * left)
        return h

    def read(self, h: Tensor) -> Tensor:
        return h * self.left


@pytest.mark.parametrize("how", ["append", "in_tuple", "assign", "hook"])
def test_what_another_stage_has_left_is_not_put_elsewhere_as_it_is(how: str):
    """Attack 22: no operation reads it, so that nobody looked whose it was."""
    pipe = bp.Pipeline(Stores(how), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"attribute 'left' of the model on hops \[0\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=lambda out: out.square().mean())


def test_what_is_read_where_it_is_may_be_left():
    pipe = bp.Pipeline(Stores("read"), devices=stages(2), chunks=4, schedule="sequential")
    assert pipe(torch.randn(8, 4)).shape == (8, 4)
