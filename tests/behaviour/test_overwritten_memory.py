"""Memory that a forward writes in place, and that the backward of an earlier micro-batch reads in a
way in which autograd compares no versions."""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import mse_loss, one_hot
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import is_simulated, stages

X, Y = torch.randn(8, 4), torch.randn(8, 4)
again = functools.partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Two stages; a test says what the code of one of them does with a result there."""

    def __init__(self, use: Callable[["Net", Tensor], Tensor], stage: int = 0) -> None:
        super().__init__()
        self.use, self.stage = use, stage
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(4))
        self.kept: Any = torch.ones(4, device=stages(2)[stage])
        self.is_ready = False

    def update(self, h: Tensor) -> None:
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            h = self.use(self, h) if self.stage == 0 else h
        with bp.Block(stage=1):
            h = self.b(h)
            return self.use(self, h) if self.stage == 1 else h


class Scale(torch.autograd.Function):
    """Keeps what it is given on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, kept: Any) -> Tensor:
        ctx.scale = kept
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * torch.as_tensor(ctx.scale), None, None


def _step(net: Net, around: Callable[[], AbstractContextManager[Any]], **options: Any) -> None:
    """A step whose gradients are the plain loop's."""
    plain = copy.deepcopy(net)
    with around():
        pipe = bp.Pipeline(net, devices=stages(2), **{"chunks": 4, **options})
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
        plain_step(plain, (X,), {}, Y, mse_loss, 4)
    assert_same_gradients(net, plain)


def _nothing() -> AbstractContextManager[Any]:
    return torch.enable_grad()


def _identity() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


# --- refused where a backward is late


def _in_checkpoint(net: Net, h: Tensor) -> Tensor:
    y = again(lambda z: (z * net.mean).tanh(), h)
    net.update(h)
    return y


def _in_reentrant_checkpoint(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    return checkpoint(lambda z: (z * net.mean[:]).tanh(), h, use_reentrant=True)


def _of_no_module_in_checkpoint(net: Net, h: Tensor) -> Tensor:
    net.kept.lerp_(h.detach().mean(0), 0.5)
    return again(lambda z: (z + net.kept).tanh().exp(), h)


def _weight_in_checkpoint(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.norm.weight.mul_(0.5)
    return again(lambda z: (z * net.norm.weight).tanh(), h)


def _statistics_in_checkpoint(net: Net, h: Tensor) -> Tensor:
    h = net.norm(h)
    return again(lambda z: (z - net.norm.running_mean).exp(), h)


def _statistics(net: Net, h: Tensor) -> Tensor:
    return net.norm(h) * net.norm.running_mean


def _statistics_in_evaluation(net: Net, h: Tensor) -> Tensor:
    h = net.norm.eval()(h).tanh()
    net.norm.train()(h.detach())
    return h


def _by_data(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    return h * net.mean.data


def _view_in_context(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    return Scale.apply(h, net.mean, net.mean[:])


def _view_in_hook(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    h, mean = h.tanh(), net.mean.detach()
    h.register_hook(lambda gradient: gradient * mean)
    return h


def _view_of_before(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    h = h.tanh()
    h.register_hook(lambda gradient: gradient * net.kept)
    return h


def _method_as_hook(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    h = h.tanh()
    h.register_hook(net.mean.mul)
    return h


def _packed(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    with _identity():
        return h * net.mean


def _plain(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    return h * net.mean


AGAIN = r"runs the function of a checkpoint again, which reads it"
SAVED, IN_CODE = "reads what autograd has saved of it", "reads it in code that autograd calls"
REFUSED = [
    (_in_checkpoint, "buffer 'mean'", AGAIN),
    (_in_reentrant_checkpoint, "buffer 'mean'", AGAIN),
    (_of_no_module_in_checkpoint, r"a tensor of shape \(4,\)", AGAIN),
    (_weight_in_checkpoint, "parameter 'norm.weight'", AGAIN),
    (_statistics_in_checkpoint, r"buffer 'norm\.running_mean'", AGAIN),
    (_statistics, r"buffer 'norm\.running_mean'", SAVED),
    (_statistics_in_evaluation, r"buffer 'norm\.running_mean'", SAVED),
    (_by_data, "buffer 'mean'", SAVED),
    (_view_in_context, "buffer 'mean'", IN_CODE),
    (_view_in_hook, "buffer 'mean'", IN_CODE),
    (_method_as_hook, "buffer 'mean'", IN_CODE),
    (_packed, "buffer 'mean'", "reads what hooks on saved tensors have kept of it"),
]


@pytest.mark.every
@pytest.mark.parametrize(("use", "what", "needs"), REFUSED)
def test_what_a_later_forward_overwrites_when_an_earlier_backward_reads_it_is_refused(
    use: Any, what: str, needs: str
) -> None:
    """The backward of micro-batch 0 read what the forward of micro-batch 1 had written."""
    where = r"on hop 0 \(.*memory\.py:\d+\)"
    message = rf"writes to {what}.* {where}, .* {needs} \(.*memory\.py:\d+\): .*clone\(\) it"
    with pytest.raises(StateError, match=message):
        _step(Net(use), _nothing)


@pytest.mark.skipif(is_simulated(), reason="a model that moves has other memory")
def test_what_a_later_forward_overwrites_when_a_hook_reads_an_old_view_is_refused() -> None:
    net = Net(_view_of_before)
    net.kept = net.mean[:]
    with pytest.raises(StateError, match=f"writes to buffer 'mean'.*{IN_CODE}"):
        _step(net, _nothing)


@pytest.mark.skipif(is_simulated(), reason="numpy and other libraries have arrays of the host")
@pytest.mark.parametrize("alias", [torch.from_dlpack, lambda mean: torch.from_numpy(mean.numpy())])
def test_what_a_later_forward_overwrites_when_another_library_shows_it_is_refused(
    alias: Callable[[Tensor], Tensor],
) -> None:
    """Such a tensor has a storage of its own, at the same address."""

    def use(net: Net, h: Tensor) -> Tensor:
        net.update(h)
        return h * alias(net.mean)

    with pytest.raises(StateError, match=f"writes to buffer 'mean'.*{SAVED}"):
        _step(Net(use), _nothing)


@pytest.mark.skipif(is_simulated(), reason="an array is on the host")
def test_an_array_in_a_context_when_a_later_forward_overwrites_it_is_refused() -> None:
    def use(net: Net, h: Tensor) -> Tensor:
        net.update(h)
        return Scale.apply(h, net.mean, net.mean.numpy())

    with pytest.raises(StateError, match=f"writes to buffer 'mean'.*{IN_CODE}"):
        _step(Net(use), _nothing)


@pytest.mark.skipif(is_simulated(), reason="save_on_cpu copies what an accelerator has")
@pytest.mark.parametrize("around", [save_on_cpu, _identity])
def test_hooks_around_a_step_when_they_keep_what_a_forward_overwrites_are_refused(
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    """They hide the write from autograd, which compares versions without them."""
    with pytest.raises(StateError, match=f"writes to buffer 'mean'.*{SAVED}"):
        _step(Net(_plain), around)


# --- what is fine


@pytest.mark.every
@pytest.mark.parametrize("use", [_in_checkpoint, _statistics, _by_data, _view_in_hook, _packed])
@pytest.mark.parametrize(("stage", "schedule"), [(1, "1f1b"), (0, "sequential")])
def test_what_a_forward_overwrites_when_no_backward_is_late_is_the_plain_loops(
    use: Any, stage: int, schedule: str
) -> None:
    _step(Net(use, stage), _nothing, schedule=schedule)


def _clones(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    mean = net.mean.clone()
    return again(lambda z: (z * mean).tanh(), h)


def _only_adds(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    return again(lambda z: net.b(z) + net.mean, h)


def _drops_the_graph(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    nearest = again(lambda z: (z * net.mean).tanh(), h).argmax(1)
    return h * one_hot(nearest, 4)


def _initializes(net: Net, h: Tensor) -> Tensor:
    if not net.is_ready:
        net.update(h)
        net.is_ready = True
    return again(lambda z: (z * net.mean).tanh(), h)


def _leaves_the_same(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.norm.weight.clamp_(-1, 1)
    return again(lambda z: (z * net.norm.weight).tanh(), h)


def _normalizes_packed(net: Net, h: Tensor) -> Tensor:
    with _identity():
        return net.norm(h).tanh()


def _normalizes_twice(net: Net, h: Tensor) -> Tensor:
    return net.norm(net.norm(h).tanh())


def _evaluates_for_no_backward(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        mean = net.norm.eval()(h).mean()
    return net.norm.train()(h) * mean


def _copies_packed(net: Net, h: Tensor) -> Tensor:
    net.update(h)
    with saved_tensors_hooks(torch.clone, lambda t: t):
        return h * net.mean


NORMS = [_normalizes_packed, _normalizes_twice, _evaluates_for_no_backward]
FINE = [_clones, _only_adds, _drops_the_graph, _initializes, _leaves_the_same]


@pytest.mark.every
@pytest.mark.parametrize("use", [*FINE, *NORMS, _copies_packed])
def test_what_a_forward_overwrites_when_no_backward_reads_it_is_fine(use: Any) -> None:
    _step(Net(use), _nothing)


def test_hooks_around_a_step_when_they_copy_what_a_forward_overwrites_are_fine() -> None:
    _step(Net(_plain), lambda: saved_tensors_hooks(torch.clone, lambda t: t))
