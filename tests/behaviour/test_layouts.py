"""Tensors that are no dense ones, and of classes of the user's, where they cross or are split."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import CrossingError, MicrobatchError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

pytestmark = pytest.mark.cpu("the simulated accelerator has dense tensors only")


class Other(Tensor):
    """A class of the user's."""


class Net(nn.Module):
    """Makes another kind of tensor on the first stage, and reads it on the second."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.made(self.a(x))
        with bp.Block(stage=1):
            return self.b(self.dense(h))

    def made(self, h: Tensor) -> Tensor:
        if self.kind == "coo":
            return h.to_sparse()
        if self.kind == "csr":
            return h.to_sparse_csr()
        if self.kind == "nested":
            return torch.nested.as_nested_tensor([h[:1], h[1:]])
        return h.as_subclass(Other)

    def dense(self, h: Tensor) -> Tensor:
        if self.kind == "nested":
            return h.to_padded_tensor(0.0)
        return h * 2 if self.kind == "other" else h.to_dense()


def _step(net: nn.Module, x: Tensor) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, isolate=True)
    pipe.forward_backward(x, loss_fn=lambda output: output.as_subclass(Tensor).square().mean())


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("coo", r"torch\.sparse_coo"), ("csr", r"torch\.sparse_csr"), ("nested", "nested")],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support|The PyTorch API of nested tensors")
def test_a_tensor_that_crosses_without_a_way_back_for_its_gradient_is_refused(
    kind: str, layout: str
) -> None:
    """It was torch's error about a missing kernel."""
    with pytest.raises(
        CrossingError,
        match=rf"expected a dense tensor .*layout is {layout}.*layouts\.py:\d+\).*make",
    ):
        _step(Net(kind), torch.randn(4, 4))


@pytest.mark.parametrize("on", [0, 1])
def test_a_tensor_when_its_class_is_another_one_crosses(on: int) -> None:
    """No function mode sees as_subclass: the graph of stage 0 was read on stage 1."""

    class Views(Net):
        def made(self, h: Tensor) -> Tensor:
            return h.as_subclass(Other) if on == 0 else h

        def dense(self, h: Tensor) -> Tensor:
            h = h if on == 0 else h.as_subclass(Other)
            assert type(h * 2) is Other
            return h * 2

    net = Views("other")
    plain = copy.deepcopy(net)
    x = torch.randn(4, 4)
    _step(net, x)
    plain_step(plain, (x,), {}, None, lambda output: output.as_subclass(Tensor).square().mean(), 2)
    assert_same_gradients(net, plain)


def test_a_sparse_batch_is_refused() -> None:
    with pytest.raises(MicrobatchError, match=r"torch\.sparse_coo \(.*layouts\.py:\d+\); pass"):
        _step(Net("coo"), torch.randn(4, 4).to_sparse())
