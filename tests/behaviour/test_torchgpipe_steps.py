"""Steps of torchgpipe's door: batches, gradients, failures and state."""

import copy
import pickle
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.compat.torchgpipe import (
    GPipe,
)
from blockpipe.errors import MicrobatchError

from ..compat.torchgpipe.gpipe_models import MODES, gpipe, layers
from ..parameter_sets import every_pair
from ..stage_devices import assert_close, device_type, host


def by_hand(net: nn.Sequential, x: Tensor, y: Tensor, chunks: int) -> None:
    """The gradients of the mean over the batch, micro-batch by micro-batch."""
    for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        (F.cross_entropy(net(part), target) * len(part) / len(x)).backward()


# --- batches


@pytest.mark.parametrize(("rows", "chunks"), [(7, 4), (2, 4), (1, 4), (12, 5)])
def test_any_number_of_rows_is_legal(rows: int, chunks: int) -> None:
    """One that does not divide, and fewer than chunks: no warning, all rows."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    plain, x = copy.deepcopy(net), torch.rand(rows, 1)
    assert_close(gpipe(net, [1, 1], chunks=chunks)(x), plain(x))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.a(pair[0]), self.b(pair[1])


def test_tuples_go_in_and_out() -> None:
    """Gradients too; a tuple of one stays one."""
    model = gpipe(nn.Sequential(Two(), Two()), [1, 1], chunks=2)
    a, b = (torch.rand(10, 1, requires_grad=True) for _ in range(2))
    one, other = model((a, b))
    (one + other).mean().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert all(p.grad is not None for p in model.parameters())

    class One(nn.Linear):
        def forward(self, only: tuple[Tensor]) -> tuple[Tensor]:
            (x,) = only
            return (super().forward(x),)

    single = gpipe(nn.Sequential(One(1, 1), One(1, 1)), [1, 1], chunks=2)
    (out,) = single((a,))
    assert out.shape == (10, 1)


def test_rows_of_other_tensors_are_not_lost() -> None:
    """torchgpipe zips chunk lists: members of another length lose rows without a word. Here they are
    an error, and whole if one says so."""

    class Table(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, table = pair
            return x + table.sum(), table

    model = gpipe(nn.Sequential(Table()), [1], chunks=4)
    x, table = torch.rand(8, 1), torch.rand(5, 1)
    with pytest.raises(
        MicrobatchError, match=r"batch's 8 samples on dim 0 for argument 0, got \(5, 1\)"
    ):
        model((x, table))
    total, scalar = model((x, torch.tensor(3.0)))[0], torch.tensor(3.0)
    assert_close(total, x + scalar)


def test_an_integer_first_tensor_loses_no_gradient() -> None:
    """torchgpipe hangs everything off the first tensor of a boundary."""

    class IntegerFirst(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.arange(len(x), device=x.device), super().forward(x)

    class Use(nn.Linear):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(pair[1]) + pair[0][:, None]

    for mode in MODES:
        net = nn.Sequential(IntegerFirst(4, 4), Use(4, 4))
        model = gpipe(net, [1, 1], chunks=2, checkpoint=mode)
        model(torch.rand(4, 4)).sum().backward()
        assert net[0].weight.grad is not None
        assert net[0].weight.grad.abs().sum() > 0


# --- steps


@pytest.mark.filterwarnings("ignore:chunks=1 on . devices:UserWarning")
@every_pair(
    balance=[[4], [1, 3], [2, 1, 1]],
    chunks=[1, 3, 4],
    mode=MODES,
)
def test_gradients_are_the_plain_ones(balance: list[int], chunks: int, mode: str) -> None:
    """Of parameters and input, for every balance, number of chunks and mode."""
    net = layers()
    plain = copy.deepcopy(net)
    model = gpipe(net, balance, chunks=chunks, checkpoint=mode)
    x = torch.rand(12, 4, requires_grad=True)
    y = torch.randint(0, 3, (12,))
    F.cross_entropy(model(x), y.to(model.devices[-1])).backward()
    x_grad, x.grad = x.grad, None
    by_hand(plain, x, y, chunks)
    assert_close(x_grad, x.grad)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.cpu("equality to the bit is promised on the CPU")
def test_on_the_cpu_gradients_are_equal_to_the_bit() -> None:
    """To a plain loop over the same micro-batches."""
    net = layers()
    plain = copy.deepcopy(net)
    model = gpipe(net, [2, 1, 1], chunks=4, checkpoint="always")
    x, y = torch.rand(12, 4), torch.randint(0, 3, (12,))
    F.cross_entropy(model(x), y).backward()
    logits = [plain(part) for part in x.chunk(4)]
    whole = torch.cat(logits).detach().requires_grad_()
    F.cross_entropy(whole, y).backward()
    for part, gradient in zip(logits, whole.grad.chunk(4), strict=True):
        part.backward(gradient)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@every_pair(
    rows=[12, 6],
    momentum=[0.1, None],
    mode=MODES,
)
def test_deferred_statistics_are_the_whole_batchs(
    rows: int, momentum: float | None, mode: str
) -> None:
    """Also of 6 rows in 4 chunks, unbiased, and far from 0: three faults of torchgpipe's."""
    net = nn.Sequential(nn.BatchNorm2d(4, momentum=momentum), nn.Conv2d(4, 4, 1))
    plain = copy.deepcopy(net)
    model = gpipe(net, [1, 1], chunks=4, checkpoint=mode, deferred_batch_norm=True)
    for _ in range(3):
        x = torch.rand(rows, 4, 3, 3) + 1e4
        model(x).mean().backward()
        plain(x)
    for name, value in plain[0].named_buffers():
        assert_close(net[0].get_buffer(name), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_deferred_batch_norm_has_gradients(mode: str) -> None:
    """Of one micro-batch, they are the plain ones."""
    net = nn.Sequential(nn.BatchNorm1d(4))
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = gpipe(net, [1], chunks=1, checkpoint=mode, deferred_batch_norm=True)
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert_close(net[0].weight.grad, plain[0].weight.grad)
    assert_close(net[0].bias.grad, plain[0].bias.grad)


def test_buffers_are_the_plain_loops() -> None:
    """Without deferring: one update for each micro-batch, recomputed or not."""
    net = layers(norm=True)
    plain, x = copy.deepcopy(net), torch.rand(8, 4)
    model = gpipe(net, [3, 2], chunks=4, checkpoint="always")
    model(x).sum().backward()
    for part in x.chunk(4):
        plain(part)
    for name, value in plain.named_buffers():
        assert_close(net.get_buffer(name), value)


def test_dropout_draws_the_same_masks_again() -> None:
    """A row that was dropped in the forward gets no gradient, of a recomputed call too."""

    class Dropouts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = F.dropout(x, p=0.01)
            return x

    x = torch.rand(10, 10, requires_grad=True)
    model = gpipe(nn.Sequential(Dropouts(), Dropouts()), [1, 1], chunks=10, checkpoint="always")
    y = model(x)
    y.norm().backward()
    assert x.grad is not None
    dropped = host(y) == 0
    assert dropped.any()
    assert torch.equal(dropped, host(x.grad) == 0)


def test_autocast_reaches_every_layer() -> None:
    """torchgpipe's workers ignore it."""
    seen: list[torch.dtype] = []
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net:
        layer.register_forward_hook(lambda *found: seen.append(found[-1].dtype))
    model = gpipe(net, [1, 1], chunks=2, checkpoint="always")
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        model(torch.rand(4, 4)).float().sum().backward()
    assert set(seen) == {torch.bfloat16}


def test_a_python_function_of_autograds() -> None:
    """That returns its input as it is."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            return input

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return Same.apply(input)

    model = gpipe(nn.Sequential(Layer(), Layer()), [1, 1], chunks=2, checkpoint="always")
    x = torch.rand(42, requires_grad=True)
    y = model(x)
    assert_close(y, x)
    y.sum().backward()
    assert_close(x.grad, torch.ones(42))


def test_in_place_on_what_the_partition_was_given() -> None:
    """Here it works; in torchgpipe a leaf that requires grad raises."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    plain, x = copy.deepcopy(net), torch.rand(4, 4)
    for mode in MODES:
        model = gpipe(net, [1, 2], chunks=2, checkpoint=mode)
        net.zero_grad()
        model(x).sum().backward()
        plain.zero_grad()
        plain(x).sum().backward()
        assert_close(net[0].weight.grad, plain[0].weight.grad)


def test_every_tensor_of_a_tuple_is_waited_for() -> None:
    """Gradients of all three arrive."""

    class Three(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            a, b = pair
            return a * 1, b * 2, b * 3

    class Sum(nn.Module):
        def forward(self, triple: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            a, b, c = triple
            return a + b + c

    model = gpipe(nn.Sequential(Three(), Sum()), [1, 1], chunks=8, checkpoint="never")
    a, b = (torch.rand(16, 3, requires_grad=True) for _ in range(2))
    model((a, b)).sum().backward()
    assert_close(a.grad, torch.ones(16, 3))
    assert_close(b.grad, torch.full((16, 3), 5.0))


class ExpectedError(Exception):
    """Of a layer."""


@pytest.mark.parametrize("kind", [ExpectedError, SystemExit])
def test_a_failure_reaches_the_caller(kind: type[BaseException]) -> None:
    """Later stages do not run for it, no thread hangs, and the next call works. torchgpipe hangs
    for ever at a ``SystemExit``."""
    after: list[int | None] = []

    class Fails(nn.Linear):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and bp.current_microbatch() == 1:
                raise kind("in micro-batch 1")
            return super().forward(x)

    class After(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            after.append(bp.current_microbatch())
            return super().forward(x)

    net = nn.Sequential(nn.Linear(4, 4), Fails(4, 4), After(4, 4))
    model = gpipe(net, [1, 1, 1], chunks=4)
    x = torch.rand(8, 4)
    model(x)
    net[1].armed = True
    after.clear()
    with pytest.raises(kind, match="in micro-batch 1"):
        model(x)
    assert set(after) <= {0}
    net[1].armed = False
    assert model(x).shape == (8, 4)


def test_the_schedule_is_gpipes() -> None:
    """Each stage: all forwards, then all backwards, each recomputed right before but for the last."""

    def partition() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.GELU())

    model = gpipe(nn.Sequential(partition(), partition()), [1, 1], chunks=3)
    x = torch.rand(6, 4)
    model(x).sum().backward()
    with model.profile() as timeline:
        model(x).sum().backward()
    done = [str(action) for action in timeline.actions()]
    for stage in range(2):
        own = [action.replace(f"{stage}.", "", 1) for action in done if action[1] == str(stage)]
        assert own == ["F0", "F1", "F2", "R0", "B0", "R1", "B1", "B2"]


def test_threads_end_when_the_pipeline_is_closed() -> None:
    """They are kept from step to step until then."""
    with gpipe(layers(), [2, 2], chunks=2) as model:
        for _ in range(3):
            model(torch.rand(4, 4)).sum().backward()
    assert not [t for t in threading.enumerate() if t.name.startswith("blockpipe") and t.is_alive()]


def test_the_rest_of_a_pipeline_is_there() -> None:
    """``forward_backward`` under 1F1B, ``verify``, options that are assigned."""
    model = gpipe(layers(), [2, 1, 1], chunks=4)
    x, y = torch.rand(8, 4), torch.randint(0, 3, (8,))
    assert model.verify(x, target=y, loss_fn=F.cross_entropy).ok
    result = model.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    assert_close(result.loss, F.cross_entropy(model(x), y.to(model.devices[-1])))
    model.chunks = 2
    model.checkpoint = "never"
    assert "partitions.1" in str(model.summary(x))


# --- state


def test_keys_are_torchgpipes() -> None:
    """``partitions.<partition>.<layer>``: read, written, and the same names in any other module."""
    net = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2), c=nn.Linear(2, 2)))
    model = gpipe(net, [2, 1], chunks=2)
    assert list(model.state_dict()) == [
        *("partitions.0.a.weight", "partitions.0.a.bias", "partitions.0.b.weight"),
        *("partitions.0.b.bias", "partitions.0.b.running_mean", "partitions.0.b.running_var"),
        *("partitions.0.b.num_batches_tracked", "partitions.1.c.weight", "partitions.1.c.bias"),
    ]
    other = gpipe(copy.deepcopy(net), [2, 1], chunks=2)
    for layer in (net.a, net.c):
        nn.init.normal_(layer.weight)
    other.load_state_dict(model.state_dict())
    assert_close(other[2].weight, net.c.weight)
    model(torch.rand(4, 2))
    other.load_state_dict(model.state_dict())
    assert_close(other[1].running_mean, net.b.running_mean)
    assert isinstance(model.partitions, nn.ModuleList)
    assert isinstance(model.partitions[0], nn.Sequential)
    assert model.partitions[1].c is net.c
    with pytest.raises(AttributeError):
        model.a  # noqa: B018


def test_a_checkpoint_goes_into_a_plain_sequential_and_back() -> None:
    """By the names behind the partition's; and into other partitions."""
    model = gpipe(layers(), [2, 1, 1], chunks=2)
    plain = layers()
    plain.load_state_dict({k.split(".", 2)[2]: v for k, v in model.state_dict().items()})
    x = torch.rand(4, 4)
    assert_close(model(x), plain(x))
    net = layers()
    again = gpipe(net, [1, 3], chunks=2)
    net.load_state_dict(plain.state_dict())
    assert_close(again(x), plain(x))


def test_inside_of_another_module_it_is_saved_and_loaded() -> None:
    """As a child, its keys are what torchgpipe's would be there."""

    class Around(nn.Module):
        def __init__(self, pipe: GPipe) -> None:
            super().__init__()
            self.pipe = pipe

    one, other = (Around(gpipe(layers(), [2, 2], chunks=2)) for _ in range(2))
    assert "pipe.partitions.0.0.weight" in one.state_dict()
    other.load_state_dict(one.state_dict())
    assert_close(other.pipe[0].weight, one.pipe[0].weight)


def test_it_is_copied_and_pickled() -> None:
    """Before and after it was placed."""
    model = gpipe(layers(), [2, 2], chunks=2)
    x = torch.rand(4, 4)
    for _ in range(2):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin[0] is not model[0]
            assert (twin.balance, len(twin)) == ([2, 2], 4)
            assert_close(twin(x), model(x))
