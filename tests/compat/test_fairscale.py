"""fairscale's door: its tutorial as printed, and what its tests add to torchgpipe's."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from blockpipe.compat import fairscale
from blockpipe.compat.fairscale.nn import Pipe, pipe
from blockpipe.compat.fairscale.nn.pipe import balance, skip
from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe import balance as torchgpipe_balance
from blockpipe.compat.torchgpipe import skip as torchgpipe_skip
from blockpipe.errors import UsageError

from ..stage_devices import assert_close, is_simulated, stages


@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices:UserWarning")
def test_the_tutorial() -> None:
    """Two layers on one device, one on the next; the loss and the optimizer's step outside."""
    import torch.optim as optim

    model = nn.Sequential(
        torch.nn.Linear(10, 10),
        torch.nn.ReLU(),
        torch.nn.Linear(10, 5),
    )
    plain = copy.deepcopy(model)

    model = fairscale.nn.Pipe(model, balance=[2, 1])

    optimizer = optim.SGD(model.parameters(), lr=0.001)
    loss_fn = F.nll_loss

    optimizer.zero_grad()
    target = torch.randint(0, 2, size=(20, 1)).squeeze()
    data = torch.randn(20, 10)

    device = model.devices[0]
    # outputs and target need to be on the same device
    # forward step
    outputs = model(data.to(device))
    # compute loss
    loss = loss_fn(outputs.to(device), target.to(device))

    # backward + optimize
    loss.backward()
    optimizer.step()

    optimizer = optim.SGD(plain.parameters(), lr=0.001)
    loss_fn(plain(data), target).backward()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours, theirs)
    assert len({str(device) for device in model.devices}) == (2 if is_simulated() else 1)


def test_the_reference_page() -> None:
    """Its two examples: four layers of which each is a partition; targets on the output's device."""
    a, b, c, d = (nn.Linear(4, 4) for _ in range(4))
    model = nn.Sequential(a, b, c, d)
    model = Pipe(model, balance=[1, 1, 1, 1], devices=stages(4), chunks=8)
    loader = [(torch.rand(16, 4), torch.randint(0, 4, (16,)))]
    pipe = model

    out_device = pipe.devices[-1]
    for input, target in loader:
        target = target.to(out_device, non_blocking=True)
        output = pipe(input)
        loss = F.cross_entropy(output, target)
        loss.backward()

    assert model.checkpoint == "except_last"
    assert model[0] is a
    assert list(model) == [a, b, c, d]
    assert all(layer.weight.grad is not None for layer in model)
    assert model.to(torch.double) is model
    with pytest.raises(UsageError, match="stages have devices of their own"):
        model.to(torch.device("cuda"))
    with pytest.raises(TypeError):
        Pipe(nn.Linear(1, 1), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adds up to the module's 1 layers"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), [2])
    with pytest.raises(IndexError):
        Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"])


def test_its_paths_have_torchgpipes_things() -> None:
    """``fairscale.nn.pipe.skip``, ``.balance``, and where a forward is."""
    assert issubclass(Pipe, GPipe)
    assert pipe.Pipe is Pipe
    assert not pipe.is_checkpointing()
    assert not pipe.is_recomputing()
    for ours, theirs in ((skip, torchgpipe_skip), (balance, torchgpipe_balance)):
        assert all(getattr(ours, name) is getattr(theirs, name) for name in ours.__all__)


class NoFloat(nn.Module):
    """Takes numbers of words, gives vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words)


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_an_input_without_floats(mode: str) -> None:
    """Of which no gradient can be asked."""
    net = nn.Sequential(NoFloat(), nn.Linear(4, 4), nn.Tanh())
    plain, words = copy.deepcopy(net), torch.randint(0, 10, (6, 3))
    model = Pipe(net, [1, 2], devices=stages(2), chunks=3, checkpoint=mode)
    model(words).sum().backward()
    plain(words).sum().backward()
    assert_close(net[0].embed.weight.grad, plain[0].embed.weight.grad)


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_an_output_without_gradient_beside_one_that_has_it(mode: str) -> None:
    """torchgpipe raises for one in a checkpointed tuple."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (super().forward(x).tanh().sigmoid()), (x > 0.5)

    class Apply(nn.Linear):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(pair[0] * pair[1]).tanh()

    net = nn.Sequential(Masked(4, 4), Apply(4, 4))
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = Pipe(net, [1, 1], devices=stages(2), chunks=3, checkpoint=mode)
    model(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_shared_parameters() -> None:
    """One parameter, one gradient: the sum of its uses on both devices."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = Pipe(net, [2, 1], devices=stages(2), chunks=3)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert net[2].weight is net[0].weight
    assert_close(net[0].weight.grad, plain[0].weight.grad)


@pytest.mark.cpu("refused before anything is placed")
def test_data_parallel_around_it_is_refused() -> None:
    """fairscale allows DDP with ``checkpoint="never"``; the error has the lines that do it."""
    model = Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"all-reduce the gradients after forward_backward"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
