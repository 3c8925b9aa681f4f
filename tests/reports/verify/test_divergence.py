"""Steps that differ from the plain loop, and the modules that are named for it."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.crossing.tensors.tensor_import import TensorImport
from blockpipe.errors import VerificationError
from blockpipe.reports.verify.result import Verification

from ...stage_devices import stages
from .verified import Wrong, WrongBehind, sharing

# --- what is wrong


def _assert_parts(found: Verification, phase: str, path: str, stage: int) -> None:
    assert not found
    assert not found.ok
    divergence = found.first_difference
    assert divergence is not None
    assert (divergence.phase, divergence.path, divergence.stage) == (phase, path, stage)
    assert f"{path!r}" in str(found)
    assert f"stage {stage}" in str(found)
    with pytest.raises(VerificationError, match="differs from the plain one"):
        found.raise_if_different()


class _Hidden:
    """State in no object of Python's."""

    @property
    def value(self) -> float:
        return sys.getrecursionlimit() / 10_000

    @value.setter
    def value(self, value: float) -> None:
        sys.setrecursionlimit(10_000 + int(value * 10_000))


def test_state_left_between_microbatches_is_found(request: pytest.FixtureRequest):
    """A number that a later stage leaves for the next micro-batch's earlier one, in the interpreter:
    no recording sees it there."""
    shared = _Hidden()
    net = sharing(shared)
    limit = sys.getrecursionlimit()
    request.addfinalizer(lambda: sys.setrecursionlimit(limit))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for _ in range(3):  # in a first step the CPU's stages take turns
        pipe.forward_backward(torch.randn(8, 8), loss_fn=torch.sum)
    shared.value = 1.0
    found = pipe.verify(torch.randn(8, 8))
    _assert_parts(found, "forward", "1", 0)
    assert found.first_difference is not None
    assert "its arguments agree" in found.first_difference.why


told_by_threads = pytest.mark.cpu("autograd gives a device a thread, in the plain run too")


@told_by_threads
def test_a_wrong_backward_is_named():
    """The module is named whose backward is given the right gradient and hands on a wrong one."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Wrong(8, 8), nn.Tanh(), nn.Linear(8, 4))
    bp.begin_blocks(net, {"2": 1, "4": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3)
    found = pipe.verify(torch.randn(6, 8))
    _assert_parts(found, "backward", "2", 1)
    right = {d.name for d in found.differences if d.kind == "gradients" and d.verdict == "exact"}
    assert right == {"2.weight", "2.bias", "4.weight", "4.bias"}


@told_by_threads
def test_a_wrong_backward_names_the_innermost_module():
    """The innermost module is named, not the container around it."""
    inner = nn.Sequential(nn.Linear(8, 8), Wrong(8, 8), nn.Linear(8, 8))
    net = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4))
    bp.begin_blocks(net, {"1": 1, "2": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3)
    _assert_parts(pipe.verify(torch.randn(6, 8)), "backward", "1.1", 1)


@told_by_threads
def test_a_wrong_weight_gradient_names_the_parameter():
    """Every gradient that is handed on agrees: the parameter is named, with its module."""

    class OnlyWeights(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, WrongBehind.apply(self.weight), self.bias)

    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), OnlyWeights(8, 4))
    bp.begin_blocks(net, {"2": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    found = pipe.verify(torch.randn(6, 8))
    _assert_parts(found, "backward", "2", 1)
    assert [d.name for d in found.differences if d.verdict == "different"] == ["2.weight"]


@pytest.mark.parametrize("microbatch", [0, 2])
def test_a_corrupted_crossing_names_its_reader_and_origin(
    monkeypatch: pytest.MonkeyPatch, microbatch: int
):
    """One tensor arrives changed: the module is named that reads it, and from where it came."""
    honest = TensorImport._imported

    def corrupt(self: Any, tensor: Tensor, tag: Any, reads: Any) -> Tensor:
        value = honest(self, tensor, tag, reads)
        broken = self._place.microbatch == microbatch and self._place.stage == 2
        if broken and threading.current_thread() is not threading.main_thread():
            with torch.no_grad():
                value.data[0, 0] += 1e-3
        return value

    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    bp.begin_blocks(net, {"1": 1, "2": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=True)
    x = torch.randn(6, 8)
    pipe.forward_backward(x, loss_fn=torch.sum)
    monkeypatch.setattr(TensorImport, "_imported", corrupt)
    found = pipe.verify(x)
    _assert_parts(found, "forward", "2", 2)
    assert found.first_difference is not None
    assert found.first_difference.microbatch == microbatch
    assert "arguments from stage 1" in found.first_difference.why


def test_a_buffer_updated_twice_is_named():
    """Every call agrees, but a buffer that a backward hook counts up does not."""

    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            is_plain = threading.current_thread() is threading.main_thread()
            self.seen.add_(1.0 if is_plain else 2.0)
            return super().forward(x)

    net = nn.Sequential(nn.Linear(8, 8), Counts())
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    found = pipe.verify(torch.randn(6, 8))
    _assert_parts(found, "forward", "1", 1)
    assert [(d.kind, d.name) for d in found.differences if d.verdict == "different"] == [
        ("buffers", "1.seen")
    ]
    assert float(net[1].seen) == 0.0


def test_wrong_code_between_modules_is_told_apart():
    """A container's own code is told apart from its modules."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if threading.current_thread() is not threading.main_thread():
                x = x + 1
            with bp.Block(stage=1):
                return self.b(x)

    pipe = bp.Pipeline(Between(), devices=stages(2), chunks=2)
    found = pipe.verify(torch.randn(4, 8))
    _assert_parts(found, "forward", "b", 1)
    assert found.first_difference is not None
    assert "its arguments differ already" in found.first_difference.why
    assert "'a'" in found.first_difference.why


@pytest.mark.cpu("on accelerators rounding is forgiven")
def test_rounding_is_told_apart_but_not_forgiven():
    """On the CPU a last bit is "within tolerance", and still not what is promised."""

    class LastBit(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            is_plain = threading.current_thread() is threading.main_thread()
            return x if is_plain else torch.nextafter(x, torch.full_like(x, 9.0)).detach() + x * 0

    net = nn.Sequential(nn.Linear(8, 8), LastBit(8, 8)).requires_grad_(False)
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    x = torch.randn(4, 8)
    found = pipe.verify(x)
    assert found.verdict == "within tolerance"
    _assert_parts(found, "forward", "1", 1)
    assert pipe.verify(x, rtol=0.0).verdict == "different"
    assert pipe.verify(x, rtol=0.0, atol=1e-3).verdict == "within tolerance"
