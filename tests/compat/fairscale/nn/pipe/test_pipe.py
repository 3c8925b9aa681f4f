"""fairscale's ``Pipe``: what its page lists, and what its tests add to torchgpipe's."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from blockpipe.compat.fairscale.nn import Pipe, pipe
from blockpipe.compat.fairscale.nn.pipe import balance, skip
from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe import balance as torchgpipe_balance
from blockpipe.compat.torchgpipe import skip as torchgpipe_skip
from blockpipe.errors import UsageError

from .....stage_devices import assert_close, stages


def test_its_page() -> None:
    """Attributes, the sequence protocol, moves and errors are those that the page of Pipe lists."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = Pipe(nn.Sequential(a, b), balance=[1, 1], devices=stages(2), chunks=8)
    assert model.checkpoint == "except_last"
    assert model[0] is a
    assert list(model) == [a, b]
    assert model.to(torch.double) is model
    with pytest.raises(UsageError, match="partitions have devices of their own"):
        model.to(torch.device("cuda"))
    with pytest.raises(TypeError, match=r"expected an nn\.Sequential"):
        Pipe(nn.Linear(1, 1), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="add up to the module's 1 layers"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), [2])
    with pytest.raises(IndexError, match="a device for each of 2 partitions, got 1"):
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
        with pytest.raises(UsageError, match=r"put a ReplicatedPipeline around"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
