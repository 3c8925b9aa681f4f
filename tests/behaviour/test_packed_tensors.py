"""Hooks that saved tensors go through: what unpacks them in a backward may read what forwards set."""

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.restoring import leaked_tensors

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X = torch.randn(8, 4)


class Net(nn.Module):
    """Two layers on two stages; what the first one saves goes through its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen, self.scale = 0, 2.0
        self.kept: dict[int, Tensor] = {}
        self.latest: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(h)

    def first(self, h: Tensor) -> Tensor:
        with saved_tensors_hooks(self.pack, self.unpack):
            return (h * h).sin()

    def pack(self, tensor: Tensor) -> Any:
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        return packed


class Numbered(Net):
    """Each saved tensor has a number of its own."""

    def pack(self, tensor: Tensor) -> Any:
        self.seen += 1
        self.kept[self.seen] = tensor
        return self.seen

    def unpack(self, packed: Any) -> Tensor:
        return self.kept[packed]


class Taken(Numbered):
    def unpack(self, packed: Any) -> Tensor:
        return self.kept.pop(packed)


class Got(Numbered):
    def unpack(self, packed: Any) -> Tensor:
        found = self.kept.get(packed)
        assert found is not None
        return found


class ByShape(Numbered):
    """Each forward uses the same keys."""

    def pack(self, tensor: Tensor) -> Any:
        self.kept[tensor.numel()] = tensor
        return tensor.numel()


class GotByShape(ByShape, Got):
    pass


class Emptied(Numbered):
    def first(self, h: Tensor) -> Tensor:
        self.kept.clear()
        return super().first(h)


class Stacked(Net):
    def pack(self, tensor: Tensor) -> Any:
        self.latest.append(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.latest.pop()


class Counted(Net):
    def pack(self, tensor: Tensor) -> Any:
        self.seen += 1
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        return packed * self.seen


class Halved(Net):
    def pack(self, tensor: Tensor) -> Any:
        return (tensor / self.scale).to(torch.float64)

    def unpack(self, packed: Any) -> Tensor:
        return packed.to(torch.float32) * self.scale


class OnHost(Net):
    def first(self, h: Tensor) -> Tensor:
        with save_on_cpu():
            return (h * h).sin()


def _step(net: Net, **options: Any) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ByShape, r"a dict on hops \[0\] \(.*, and reads it in a backward on hops \[0\]"),
        (GotByShape, r"a dict on hops \[0\] \(.*, and reads it in a backward on hops \[0\]"),
        (Emptied, r"a dict on hops \[0\] \(.*, and reads it in a backward on hops \[0\]"),
        (Stacked, r"a list in a backward on hops \[0\] \(.*, and reads it in a backward on hops"),
        (Counted, r"'seen' of the model on hops \[0\] \(.*, and reads it in a backward on hops"),
    ],
)
def test_what_unpacks_a_tensor_and_reads_what_a_later_forward_sets_is_refused(
    kind: type[Net], what: str
) -> None:
    """It got another micro-batch's tensor, without a word."""
    with pytest.raises(StateError, match=what):
        _step(kind())


@pytest.mark.every
@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"checkpoint": "always"}])
@pytest.mark.parametrize("kind", [Net, Numbered, Taken, Got, Halved, OnHost])
def test_what_unpacks_a_micro_batchs_own_tensor_runs_as_in_the_plain_loop(
    kind: type[Net], options: dict[str, Any]
) -> None:
    net = kind()
    plain = copy.deepcopy(net)
    _step(net, **options)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


class Plain(Net):
    """It has no hooks of its own."""

    def first(self, h: Tensor) -> Tensor:
        return h.sin()


def _counts_around() -> AbstractContextManager[Any]:
    count = [0]

    def pack(tensor: Tensor) -> Tensor:
        count[0] += 1
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor * count[0])


def test_hooks_around_a_step_that_count_are_refused_in_the_step_that_they_are_around() -> None:
    """A recording of a step without them does not serve a step with them."""
    net = Plain()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    message = r"a list on hops \[0, 1\] \(.*, and reads it in a backward on hops \[0, 1\]"
    with _counts_around(), pytest.raises(StateError, match=message):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize(
    "around", [save_on_cpu, lambda: saved_tensors_hooks(torch.clone, torch.clone)]
)
def test_hooks_around_a_step_that_keep_nothing_need_no_other_recording(
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    net = Plain()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    recording = pipe.recording
    net.zero_grad()
    with around():
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert pipe.recording is recording
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


class ReadsItsOwn(Net):
    """The graph keeps itself: the hooks give what they pack back as it is, and hold ``h``."""

    def first(self, h: Tensor) -> Tensor:
        pack = lambda t: t if t.shape == h.shape else t.clone()  # noqa: E731
        with saved_tensors_hooks(pack, lambda t: t):
            return h.sin().tanh()


def test_a_hook_that_reads_a_tensor_of_its_micro_batch_is_no_leak() -> None:
    net = ReadsItsOwn()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    plain_step(plain, (x,), {}, y, mse_loss, 2)
    assert_same_gradients(net, plain)


def test_a_recording_when_it_is_over_is_in_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such recording had to look at every object of the process: a third of a second."""
    collected: list[bool] = []
    monkeypatch.setattr(
        leaked_tensors, "collect_until", lambda is_over: collected.append(True) or True
    )
    gc.collect()
    gc.disable()
    try:
        pipe = bp.Pipeline(Numbered(), devices=stages(2), chunks=2)
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)
    finally:
        gc.enable()
    assert not collected
