"""A balance by profiling, in torchgpipe's words: what its tests pin."""

import copy

import pytest
import torch
from torch import Tensor, nn

from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe.balance import balance_by_size, balance_by_time


class Work(nn.Linear):
    """As many matrix products as it is told."""

    def __init__(self, times: int) -> None:
        super().__init__(96, 96)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = super().forward(x).tanh()
        return x


@pytest.mark.cpu("profiled on the CPU")
def test_balance_by_time() -> None:
    """The heaviest partition is as light as can be; a twentieth of the work does not count."""
    net = nn.Sequential(*(Work(times) for times in (1, 1, 1, 20, 1)))
    assert balance_by_time(3, net, torch.rand(256, 96), device="cpu", timeout=0.1) in (
        [3, 1, 1],
        [2, 2, 1],
    )


@pytest.mark.cpu("profiled on the CPU")
def test_profiling_leaves_the_model_as_it_was() -> None:
    """It is profiled in training mode; modes, buffers and gradients are as before."""

    class Trains(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            return super().forward(x)

    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Trains(), nn.Linear(48, 2))
    net[0].weight.grad = torch.ones_like(net[0].weight)
    net.eval()
    net[1].train()
    before = copy.deepcopy(net.state_dict())
    sizes = balance_by_time(2, net, torch.rand(2, 3, 4, 4), device="cpu")
    assert (sum(sizes), len(sizes)) == (4, 2)
    assert [layer.training for layer in net] == [False, True, False, False]
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[3].weight.grad is None


class Sines(nn.Module):
    """Keeps as many activations as it is told."""

    def __init__(self, times: int, width: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width) if width else None
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        if self.fc is not None:
            x = x + self.fc.weight.sum()
        for _ in range(self.times):
            x = x.sin()
        return x


@pytest.mark.cpu("counted for the CPU")
@pytest.mark.parametrize(
    ("times", "sizes"), [((1, 2, 3, 4, 5, 6), [4, 2]), ((6, 5, 4, 3, 2, 1), [2, 4])]
)
def test_balance_by_size_counts_activations(times: tuple[int, ...], sizes: list[int]) -> None:
    """torchgpipe needs CUDA for that."""
    net = nn.Sequential(*map(Sines, times))
    sample = torch.rand(10, 100, 100, requires_grad=True)
    assert balance_by_size(2, net, sample, device="cpu") == sizes
    assert balance_by_size(2, net, sample, device="cpu", chunks=4) == sizes


@pytest.mark.cpu("counted for the CPU")
def test_balance_by_size_weighs_parameters() -> None:
    """By ``param_scale``: what the optimizer keeps decides."""
    net = nn.Sequential(*(Sines(7 - n, 10 * n) for n in range(1, 7)))
    sample = torch.rand(1, 20_000, requires_grad=True)
    assert balance_by_size(2, net, sample, param_scale=2, device="cpu") == [2, 4]
    assert balance_by_size(2, net, sample, param_scale=100, device="cpu") == [4, 2]


@pytest.mark.cpu("counted for the CPU")
def test_layers_of_other_kinds_are_balanced() -> None:
    """Tuples between them, layers without an operation, one layer several times."""

    class Twin(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.detach()

    class Add(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    sample = torch.rand(4, 4, requires_grad=True)
    assert balance_by_time(1, nn.Sequential(Twin(), Add()), sample, device="cpu") == [2]
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.Identity(), shared, nn.Identity(), nn.Tanh())
    sizes = balance_by_size(2, net, sample, device="cpu")
    assert sum(sizes) == 5
    GPipe(net, sizes, devices=["cpu"] * 2, chunks=2)(sample).sum().backward()


@pytest.mark.cpu("nothing runs")
def test_balances_that_cannot_be_are_value_errors() -> None:
    """More partitions than layers, or none."""
    net, sample = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.rand(1, 2)
    for partitions in (3, 0, -1):
        with pytest.raises(ValueError, match=r"stages"):
            balance_by_size(partitions, net, sample, device="cpu")
    with pytest.raises(TypeError, match=r"expected an nn\.Sequential for module, got Linear"):
        balance_by_time(2, nn.Linear(2, 2), sample)  # type: ignore[arg-type]
