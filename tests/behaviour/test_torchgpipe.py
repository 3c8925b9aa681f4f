"""torchgpipe's guide and fairscale's pages: their code as printed, but for the imports.

What their text leaves to the reader (``layer1``, a data loader) is filled in.
"""

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import blockpipe as bp
from blockpipe.compat import fairscale
from blockpipe.compat.fairscale.nn import Pipe
from blockpipe.compat.torchgpipe import GPipe, current_microbatch, is_recomputing
from blockpipe.compat.torchgpipe.balancing import balance_by_size, balance_by_time
from blockpipe.devices.devices import default_devices
from blockpipe.errors import RecordingError, StateError

from ..stage_devices import assert_close, is_simulated, stages

# The guide's layers call functions that it does not print. Global ones, as printed, are nobody's
# children, and stay on the CPU; the tests on other devices have layers with parameters.
layer1, layer2, layer3, layer8 = (nn.Linear(4, 4) for _ in range(4))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    yield
    for layer in (layer1, layer2, layer3, layer8):
        layer.zero_grad()


def _gradients() -> list[Tensor | None]:
    return [layer.weight.grad for layer in (layer1, layer2, layer3, layer8)]


def _assert_gradients_of(plain: Tensor) -> None:
    """The gradients of the guide's layers are those of this loss."""
    ours = [None if grad is None else grad.clone() for grad in _gradients()]
    for layer in (layer1, layer2, layer3, layer8):
        layer.zero_grad()
    plain.backward()
    assert sum(grad is not None for grad in ours) >= 2
    for one, other in zip(ours, _gradients(), strict=True):
        assert_close(one, other)


# --- file 003: the guide of torchgpipe


@pytest.mark.cpu("four devices are too many for some machines")
def test_the_guides_first_example() -> None:
    """Four layers in four partitions, 8 micro-batches."""
    a, b, c, d = (nn.Linear(4, 4) for _ in range(4))
    data_loader = [torch.rand(16, 4), torch.rand(16, 4)]

    model = nn.Sequential(a, b, c, d)
    model = GPipe(model, balance=[1, 1, 1, 1], chunks=8)

    for input in data_loader:
        output = model(input)

    assert_close(output, d(c(b(a(data_loader[-1])))))


def test_the_guides_training_loop() -> None:
    """Input and target on the devices of the ends; the loss outside of the pipeline."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    plain = copy.deepcopy(net)
    model = GPipe(net, [2, 1, 1], devices=stages(3), chunks=4)
    data_loader = [(torch.rand(8, 4), torch.randint(0, 3, (8,)))]

    in_device = model.devices[0]
    out_device = model.devices[-1]

    for input, target in data_loader:
        # input on in_device
        input = input.to(in_device, non_blocking=True)

        # target on out_device
        target = target.to(out_device, non_blocking=True)

        # output on out_device
        output = model(input)
        loss = F.cross_entropy(output, target)
        loss.backward()

    assert output.device == out_device
    for part, labels in zip(*(one.chunk(4) for one in data_loader[0]), strict=True):
        (F.cross_entropy(plain(part), labels) / 4).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.cpu("balanced for the CPU, to be fast")
def test_the_guides_automatic_balancing() -> None:
    """``torchgpipe_balancing`` takes the model first."""
    model = nn.Sequential(
        nn.AvgPool2d(8), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(26), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip

    sample = torch.rand(128, 3, 224, 224)
    balance = balance_by_time(model, sample, partitions=4)

    model = GPipe(model, balance, chunks=8)

    assert (sum(balance), len(balance)) == (6, 4)
    assert model(sample).shape == (128, 10)
    assert sum(balance_by_size(nn.Sequential(*model), sample, partitions=2)) == 6


def test_the_guides_refusals() -> None:
    """A model that is no sequential, and a layer of several arguments."""
    models = pytest.importorskip("torchvision.models")

    model = models.resnet101()
    with pytest.raises(TypeError, match=r"expected an nn\.Sequential .* got ResNet .*Pipeline"):
        GPipe(model, balance=..., chunks=...)  # type: ignore[arg-type]

    class MyModule(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return a + b - c

    model = nn.Sequential(nn.Linear(4, 4), MyModule())
    model = GPipe(model, [1, 1], devices=stages(2), chunks=2)
    with pytest.raises(RecordingError, match=r"missing 2 required positional arguments"):
        model(torch.rand(4, 4))


class Layer1(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return layer1(input), input


class Layer2(nn.Module):
    def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        input, skip = input_and_skip
        return layer2(input), skip


class Layer3(nn.Module):
    def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> Tensor:
        input, skip = input_and_skip
        return layer3(input) + skip


@pytest.mark.cpu("the guide's layers are global, and stay there")
def test_the_guides_skip_through_tuples() -> None:
    """A skip that every layer hands on."""
    model = nn.Sequential(Layer1(), Layer2(), Layer3())
    plain = model

    model = GPipe(model, balance=[1, 1, 1], chunks=8)

    x = torch.rand(16, 4)
    model(x).mean().backward()
    _assert_gradients_of(plain(x).mean())


# The shared memory between Layer1 and Layer8.
skip_buf: Tensor | None = None


class GlobalLayer1(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        # Remember the skipping tensor.
        global skip_buf
        skip_buf = input

        return layer1(input)


class OneLayer2(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return layer2(input)


class GlobalLayer8(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        # Retrieve the skipping tensor.
        global skip_buf
        skip = skip_buf

        # Release the shared memory.
        skip_buf = None

        # The tensor should be copied to the device manually.
        skip = skip.to(input.device)  # type: ignore[union-attr]

        return layer8(input) + skip


@pytest.mark.cpu("the guide's layers are global, and stay there")
def test_the_guides_failing_example_fails_loudly() -> None:
    """A global variable between two partitions: the error names both micro-batches, and its line."""
    net = nn.Sequential(GlobalLayer1(), OneLayer2(), GlobalLayer8())
    message = r"(?s)'skip_buf'.*test_torchgpipe.py:\d+.*micro-batches 0 and 1.*current_microbatch"
    with pytest.raises(StateError, match=message):
        GPipe(net, balance=[1, 1, 1], chunks=8)(torch.rand(16, 4))
    assert skip_buf is None


overtaken = threading.Event()


class WatchedLayer1(GlobalLayer1):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if bp.current_microbatch() == 1:
            overtaken.set()
        return output


class LeavingLayer8(nn.Module):
    waits = threading.Event()  # what is in it is no reason to record anew

    def forward(self, input: Tensor) -> Tensor:
        if self.waits.is_set() and bp.current_microbatch() == 0:
            overtaken.wait(30)
        assert skip_buf is not None
        return layer8(input) + skip_buf.to(input.device)


@pytest.mark.cpu("one thread issues all forwards, and cannot wait for another")
def test_a_global_that_is_never_emptied_fails_when_it_mixes() -> None:
    """A later micro-batch has overwritten it: the error names both."""
    global skip_buf
    net = nn.Sequential(WatchedLayer1(), OneLayer2(), LeavingLayer8())
    model, x = GPipe(net, [1, 1, 1], devices=stages(3), chunks=8), torch.rand(16, 4)
    try:
        model(x)
        overtaken.clear()
        net[2].waits.set()
        message = r"micro-batch 0 on stage 2 reads .* belongs to micro-batch [1-7] of this step"
        with pytest.raises(StateError, match=message):
            model(x)
    finally:
        skip_buf = None
        net[2].waits.clear()


# The shared memory between Layer1 and Layer8 indexed by micro-batch.
skips: dict[Tensor, Tensor] = {}


class LongLayer1(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        # Remember the skipping tensor per micro-batch.
        skips[current_microbatch()] = input

        return layer1(input)


class LongLayer8(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        # Retrieve the skipping tensor for the current micro-batch.
        skip = skips.pop(current_microbatch())

        # The tensor should be copied to the device manually.
        skip = skip.to(input.device)

        return layer8(input) + skip


@pytest.mark.cpu("the guide's layers are global, and stay there")
@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_the_guides_long_skip(mode: str) -> None:
    """A dictionary by ``current_microbatch()``: right, and empty afterwards."""
    net = nn.Sequential(LongLayer1(), OneLayer2(), LongLayer8())
    model, x = GPipe(net, balance=[1, 1, 1], chunks=8, checkpoint=mode), torch.rand(16, 4)
    model(x).square().mean().backward()
    assert not skips
    _assert_gradients_of(net(x).square().mean())  # outside, the key is None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0

    def forward(self, input: Tensor) -> Tensor:
        if not is_recomputing():
            self.counter += 1
        return input


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_the_guides_counter(mode: str) -> None:
    """It counts the micro-batches, however many of them are recomputed."""
    counter = Counter()
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(counter, nn.Tanh(), nn.Sigmoid()))
    model = GPipe(net, [1, 1], devices=stages(2), chunks=3, checkpoint=mode)
    for step in range(1, 3):
        model(torch.rand(6, 4)).sum().backward()
        assert counter.counter == 3 * step


# --- file 000: fairscale's tutorial


@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices:UserWarning")
def test_fairscales_tutorial() -> None:
    """Two layers on one device, one on the next; the loss and the optimizer's step outside."""
    import torch.optim as optim

    class ToyModel(nn.Module):
        def __init__(self) -> None:
            super(ToyModel, self).__init__()  # noqa: UP008 - as printed
            self.net1 = torch.nn.Linear(10, 10)
            self.relu = torch.nn.ReLU()
            self.net2 = torch.nn.Linear(10, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.net1(x))
            return self.net2(x)

    toy = ToyModel()

    model = nn.Sequential(
        torch.nn.Linear(10, 10),
        torch.nn.ReLU(),
        torch.nn.Linear(10, 5),
    )
    toy.net1, toy.net2 = copy.deepcopy(model[0]), copy.deepcopy(model[2])

    model = fairscale.nn.Pipe(model, balance=[2, 1])

    optimizer = optim.SGD(model.parameters(), lr=0.001)
    loss_fn = F.nll_loss

    optimizer.zero_grad()
    target = torch.randint(0, 2, size=(20, 1)).squeeze()
    data = torch.randn(20, 10)

    device = model.devices[0]
    ## outputs and target need to be on the same device
    # forward step
    outputs = model(data.to(device))
    # compute loss
    loss = loss_fn(outputs.to(device), target.to(device))

    # backward + optimize
    loss.backward()
    optimizer.step()

    optimizer = optim.SGD(toy.parameters(), lr=0.001)
    loss_fn(toy(data), target).backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), toy.parameters(), strict=True):
        assert_close(ours, theirs)
    assert len({str(device) for device in model.devices}) == (2 if is_simulated() else 1)


# --- file 001: fairscale's page of Pipe


def test_the_page_of_fairscales_pipe() -> None:
    """Its two examples: four layers of which each is a partition; targets on the output's device."""
    a, b, c, d = (nn.Linear(4, 4) for _ in range(4))
    input = torch.rand(16, 4)
    if len(default_devices() or range(4)) >= 4:
        model = nn.Sequential(a, b, c, d)
        model = Pipe(model, balance=[1, 1, 1, 1], chunks=8)
        output = model(input)
        assert output.shape == (16, 4)

    pipe = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=stages(2), chunks=8)
    loader = [(input, torch.randint(0, 4, (16,)))]

    out_device = pipe.devices[-1]
    for input, target in loader:
        target = target.to(out_device, non_blocking=True)
        output = pipe(input)
        loss = F.cross_entropy(output, target)
        loss.backward()

    assert all(layer.weight.grad is not None for layer in pipe)
