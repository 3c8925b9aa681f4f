"""Values that a function under torch.utils.checkpoint reads again, after later forwards."""

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import blockpipe as bp
from blockpipe._torch.graph import saved_tensor_hooks
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import stages

# Of torch 2.11, which ends its generator late where a forward raises in a checkpoint.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object _checkpoint:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """That generator goes with the test that made it."""
    yield
    gc.collect(1)  # it is young


Inner = Callable[["Net", Tensor], Tensor]


class Middle(nn.Module):
    """A sealed module that does what a test says, and keeps values of its own."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.inner = inner
        self.scale, self.calls, self.seen = 1.0, 0, []
        self.kept: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(self, h)


class Net(nn.Module):
    """Two stages, the first with a module that has a checkpoint."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, 4), Middle(inner), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.middle(self.a(x))
        with bp.Block(stage=1):
            return self.b(h)


def largest(h: Tensor) -> float:
    return h.detach().abs().max().item()


def _counts(reentrant: bool) -> Inner:
    def inner(net: Middle, h: Tensor) -> Tensor:
        def again(h: Tensor) -> Tensor:
            net.calls += 1
            return (h * net.calls).tanh()

        return checkpoint(again, h, use_reentrant=reentrant)

    return inner


def _reads(net: Middle, h: Tensor) -> Tensor:
    net.scale = largest(h)
    return checkpoint(lambda h: (h * net.scale).tanh(), h, use_reentrant=False)


def _reads_tensor(net: Middle, h: Tensor) -> Tensor:
    net.kept = h.detach().abs().mean()
    return checkpoint(lambda h: (h * net.kept).tanh(), h, use_reentrant=False)


def _reads_in_a_layer(net: Middle, h: Tensor) -> Tensor:
    net.scale = largest(h)
    layers = nn.Sequential(nn.Tanh(), Scale(net), nn.Tanh())
    return checkpoint_sequential(layers, 2, h, use_reentrant=False)


def _leaves_for_the_next(net: Middle, h: Tensor) -> Tensor:
    def again(h: Tensor) -> Tensor:
        net.scale = largest(h)
        return h.tanh()

    return checkpoint(again, h * net.scale, use_reentrant=False)


class Scale(nn.Module):
    """Reads another module's value."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.__dict__["middle"] = middle

    def forward(self, h: Tensor) -> Tensor:
        return h * self.middle.scale


def _step(net: Net, steps: int = 1, **options: object) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    for _ in range(steps):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize(
    ("inner", "what"),
    [
        (_counts(reentrant=False), r"middle\.calls on hops \[0\].*reads it in a backward"),
        (_counts(reentrant=True), r"middle\.calls on hops \[0\].*reads it in a backward"),
        (_reads, r"middle\.scale on hops \[0\].*reads it in a backward"),
        (_reads_tensor, r"middle\.kept on hops \[0\].*reads it in a backward"),
        (_reads_in_a_layer, r"middle\.scale on hops \[0\].*reads it in a backward"),
        (_leaves_for_the_next, r"middle\.scale on hops \[0\].*reads it on"),
    ],
)
def test_what_a_checkpoint_reads_again_and_a_forward_sets_is_refused(
    inner: Inner, what: str
) -> None:
    """The forwards of later micro-batches had set it by then, without a word."""
    with pytest.raises(StateError, match=rf"{what}.*points\.py:\d+\).*torch\.utils\.checkpoint"):
        _step(Net(inner))


def _sets_first(net: Middle, h: Tensor) -> Tensor:
    def again(h: Tensor) -> Tensor:
        net.scale = largest(h)
        return (h * net.scale).tanh()

    return checkpoint(again, h, use_reentrant=False)


def _only_counts(net: Middle, h: Tensor) -> Tensor:
    def again(h: Tensor) -> Tensor:
        net.calls += 1
        net.seen.append(h.shape)
        return h.tanh()

    return checkpoint(again, h, use_reentrant=False)


def _passes_it(net: Middle, h: Tensor) -> Tensor:
    net.scale = largest(h)
    return checkpoint(lambda h, k: (h * k).tanh(), h, net.scale, use_reentrant=False)


def _makes_it_once(net: Middle, h: Tensor) -> Tensor:
    def again(h: Tensor) -> Tensor:
        if net.kept is None:
            net.kept = torch.full((4,), 0.5, device=h.device)
        return (h * net.kept).tanh()

    return checkpoint(again, h, use_reentrant=False)


def _reads_a_setting(net: Middle, h: Tensor) -> Tensor:
    net.calls += 1
    return checkpoint(lambda h: (h * net.scale).tanh(), h, use_reentrant=False)


def _leaves_for_itself(net: Middle, h: Tensor) -> Tensor:
    def again(h: Tensor) -> Tensor:
        net.scale = largest(h)
        return h.tanh()

    return checkpoint(again, h, use_reentrant=False) * net.scale


@pytest.mark.every
@pytest.mark.parametrize(
    "inner",
    [
        *(_sets_first, _only_counts, _passes_it, _makes_it_once, _reads_a_setting),
        _leaves_for_itself,
    ],
)
def test_what_a_checkpoint_reads_again_as_it_was_is_fine(inner: Inner) -> None:
    net = Net(inner)
    plain = copy.deepcopy(net)
    _step(net, 2)
    assert saved_tensor_hooks() is None  # a checkpoint that raises on fake tensors leaves its own
    for _ in range(2):
        plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def test_what_a_checkpoint_sets_and_reads_is_the_plain_loops_one_by_one() -> None:
    net = Net(_counts(reentrant=False))
    plain = copy.deepcopy(net)
    _step(net, schedule="sequential")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)
    assert net.middle.calls == plain.middle.calls
