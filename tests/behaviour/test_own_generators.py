"""Random generators of the user's own, of Python and numpy, and arrays that tensors share."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import check_trains_alike
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

OF_MODULE = random.Random(0)


class Net(nn.Module):
    """Two layers on two stages, each with what a test does there."""

    def __init__(self, first: Callable[..., Tensor], second: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = first, second
        self.random, self.other = random.Random(0), random.Random(1)
        self.bits = np.random.PCG64(0)
        self.numpy, self.old = np.random.default_rng(0), np.random.RandomState(0)
        self.torchs, self.state = torch.Generator(), torch.Generator().get_state()
        self.array = np.ones((2, 4), dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(self, self.a(x).tanh())
        with bp.Block(stage=1):
            return self.second(self, self.b(h))


def drawn(generator: random.Random) -> float:
    return generator.random()


def _of_python(net: Net, h: Tensor) -> Tensor:
    return h * net.random.random()


def _by_a_function(net: Net, h: Tensor) -> Tensor:
    return h * drawn(net.random)


def _by_a_local_name(net: Net, h: Tensor) -> Tensor:
    own = net.random
    return h * own.uniform(0.0, 1.0)


def _of_numpy(net: Net, h: Tensor) -> Tensor:
    return h * float(net.numpy.normal())


def _of_old_numpy(net: Net, h: Tensor) -> Tensor:
    return h * float(net.old.rand())


def _of_bits(net: Net, h: Tensor) -> Tensor:
    return h * float(np.random.Generator(net.bits).random())


def _of_module(net: Net, h: Tensor) -> Tensor:
    return h * OF_MODULE.random()


def _of_another(net: Net, h: Tensor) -> Tensor:
    return h * net.other.random()


def _of_a_new_one(net: Net, h: Tensor) -> Tensor:
    return h * random.Random(3).random()


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize(
    ("draws", "what"),
    [
        (_of_python, "a Random"),
        (_by_a_function, "a Random"),
        (_by_a_local_name, "a Random"),
        (_of_numpy, "a Generator"),
        (_of_old_numpy, "a RandomState"),
        (_of_bits, "a PCG64"),
        (_of_module, "a Random"),
    ],
)
def test_a_generator_that_several_stages_draw_from_is_refused(
    draws: Callable[..., Tensor], what: str
) -> None:
    """Which micro-batch got which numbers depended on timing."""
    pipe = bp.Pipeline(Net(draws, draws), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=rf"{what} on hops \[0, 1\] \(.*tors\.py.*of its own"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _of_its_bits(net: Net, h: Tensor) -> Tensor:
    return h * float(net.numpy.bit_generator.random_raw() % 7)


def _of_more_bits(net: Net, h: Tensor) -> Tensor:
    return h * float(net.same.random())


def _spawns(net: Net, h: Tensor) -> Tensor:
    return h * float(np.random.default_rng(net.seeds.spawn(1)[0]).random())


def _seeded(net: Net, h: Tensor) -> Tensor:
    return h * float(np.random.default_rng(net.seeds).random())


@pytest.mark.parametrize(
    ("first", "last", "what"),
    [
        (_of_numpy, _of_more_bits, "a PCG64"),
        (_of_numpy, _of_its_bits, "a Generator"),
        (_spawns, _spawns, "a SeedSequence"),
        (_seeded, _seeded, ""),
    ],
)
def test_what_several_generators_of_numpy_draw_from_is_one_source(
    first: Callable[..., Tensor], last: Callable[..., Tensor], what: str
) -> None:
    """Attack 40: each generator was looked at for itself, and a sequence of seeds not at all."""
    net = Net(first, last)
    net.same, net.seeds = np.random.Generator(net.numpy.bit_generator), np.random.SeedSequence(3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    if not what:  # nothing advances it
        assert pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss.isfinite()
        return
    with pytest.raises(StateError, match=what):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _now_and_then(net: Net, h: Tensor) -> Tensor:
    if h.abs().max().item() > 1e9:
        h = h * torch.rand(1, generator=net.torchs)
    return h


def test_a_generator_of_torch_that_a_branch_alone_draws_from_is_refused():
    pipe = bp.Pipeline(Net(_of_torch, _now_and_then), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"a torch.Generator is drawn from.* on hops \[0, 1\]"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def _seeds(net: Net, h: Tensor) -> Tensor:
    net.torchs.manual_seed(0)
    return h


def _sets_state(net: Net, h: Tensor) -> Tensor:
    own = net.torchs
    own.set_state(net.state)
    return h


def _asks_state(net: Net, h: Tensor) -> Tensor:
    return h * net.torchs.get_state()[0].item()


def _asks_seed(net: Net, h: Tensor) -> Tensor:
    return h * float(net.torchs.initial_seed() % 7)


def _of_torch(net: Net, h: Tensor) -> Tensor:
    return h * torch.rand(4, generator=net.torchs).to(h.device)


def _of_torch_from_a_seed(net: Net, h: Tensor) -> Tensor:
    return _of_torch(net, _seeds(net, h))


def _nothing(net: Net, h: Tensor) -> Tensor:
    return h


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_seeds, _of_torch),
        (_sets_state, _of_torch),
        (_asks_state, _of_torch),
        (_seeds, _asks_seed),
    ],
)
def test_a_generator_of_torchs_that_another_stage_seeds_or_asks_is_refused(
    first: Callable[..., Tensor], second: Callable[..., Tensor]
) -> None:
    """A later micro-batch seeded it before the one ahead had drawn."""
    pipe = bp.Pipeline(Net(first, second), devices=stages(2), chunks=4)
    with pytest.raises(
        StateError, match=r"seeded or asked for its state on hops \[0, 1\] \(.*tors\.py"
    ):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.every
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_of_python, _of_another),
        (_of_a_new_one, _of_a_new_one),
        (_of_torch_from_a_seed, _nothing),
        (_asks_seed, _of_torch),
        (_asks_state, _asks_state),
    ],
)
def test_a_generator_for_each_stage_gives_the_plain_loops_numbers(
    first: Callable[..., Tensor], second: Callable[..., Tensor]
) -> None:
    net = Net(first, second)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def _shares(net: Net, h: Tensor) -> Tensor:
    net.array[...] = float(h.shape[0])
    net.array += 1.0
    return h * torch.from_numpy(net.array).to(h.device)


def _copies(net: Net, h: Tensor) -> Tensor:
    net.array += 1.0
    return h * torch.tensor(net.array, device=h.device)


def test_a_tensor_with_the_memory_of_an_array_that_the_forward_writes_is_refused() -> None:
    """Autograd keeps the tensor, and the next micro-batch wrote to its memory."""
    pipe = bp.Pipeline(Net(_shares, _nothing), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"an ndarray on hops \[0\].*in a backward.*torch\.tensor"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


def test_a_copy_of_an_array_that_the_forward_writes_is_fine() -> None:
    net = Net(_copies, _nothing)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


class Sequence(nn.Module):
    """Two layers, and points of a quasirandom sequence on the stages that a test asks for."""

    def __init__(self, draws_on: tuple[int, ...]) -> None:
        super().__init__()
        self.a, self.b, self.draws_on = nn.Linear(4, 4), nn.Linear(4, 4), draws_on
        self.engine = torch.quasirandom.SobolEngine(4, scramble=True, seed=0)

    def drawn(self, h: Tensor) -> Tensor:
        return h * self.engine.draw(2)[1].to(h.device)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            h = self.drawn(h) if 0 in self.draws_on else h
        with bp.Block(stage=1):
            h = self.b(h)
            return self.drawn(h) if 1 in self.draws_on else h


def test_a_recording_leaves_a_quasirandom_sequence_where_it_was():
    net = Sequence((1,))
    plain, x, y = copy.deepcopy(net), torch.randn(8, 4), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, y, mse_loss, 4)
        assert net.engine.num_generated == plain.engine.num_generated
        assert torch.equal(net.engine.quasi, plain.engine.quasi)
    assert_same_gradients(net, plain)


def test_a_quasirandom_sequence_that_two_stages_draw_from_is_refused():
    pipe = bp.Pipeline(Sequence((0, 1)), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="SobolEngine on hops.*generator of its own"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


@contextmanager
def seeded(kind: str, seed: int) -> Iterator[None]:
    """Draw by a seed for a while, as fairseq's ``numpy_seed`` does."""
    before = np.random.get_state() if kind == "numpy" else random.getstate()
    (np.random if kind == "numpy" else random).seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before) if kind == "numpy" else random.setstate(before)


class Masks(nn.Module):
    """Has a mask on each stage that a seed says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def mask(self, seed: int) -> Tensor:
        draw = np.random.rand if self.kind == "numpy" else random.random
        with seeded(self.kind, seed):
            drawn = []
            for _ in range(4):
                time.sleep(0.002)  # another thread may draw
                drawn.append(draw())
        return torch.tensor(drawn, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.mask(1).to(x.device)
        with bp.Block(stage=1):
            mask = self.mask(2)
            return self.b(h) * mask.to(h.device)


@pytest.mark.parametrize("kind", ["numpy", "random"])
def test_stages_that_seed_a_generator_and_set_it_back_take_turns(kind: str):
    """Attack 24: the state was the same in the end, so that nobody saw that they drew."""
    check_trains_alike(Masks(kind))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_loss_that_draws_from_the_generator_of_another_stage_is_refused(stage: int):
    """Attack 25: with ``random.Random`` it was; a ``torch.Generator`` was drawn from in an order
    that timing gave."""

    def noisy(net: Net, h: torch.Tensor) -> torch.Tensor:
        return h + torch.rand(4, generator=net.torchs).to(h.device)

    def plain(net: Net, h: torch.Tensor) -> torch.Tensor:
        return h

    net = Net(*((noisy, plain) if stage == 0 else (plain, noisy)))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(out + torch.rand(4, generator=net.torchs).to(out.device), y)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    if stage == 0:
        with pytest.raises(StateError, match=r"a torch.Generator .*on hops"):
            pipe.forward_backward(x, target=y, loss_fn=loss)
    else:
        pipe.forward_backward(x, target=y, loss_fn=loss)
