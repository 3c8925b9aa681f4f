"""What several processes run together: gradients and state that are not dense tensors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, ReplicatedPipeline

from .cases import SCHEDULES, compare, mean_square


class Sometimes(nn.Module):
    """Layers on stages, of which the last one reads the first one's result without its gradient."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with bp.Block(number):
                if number == 0:
                    skip = x = layer(x)
                else:
                    x = layer(x.detach() if number == 1 else x) + skip.detach()
        return x


def a_stage_without_a_gradient_has_none(rank: int, ranks: int) -> None:
    """Under every schedule."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for name, per_rank in SCHEDULES.items():
        model: Any = Sometimes(ranks * per_rank)
        for layer in model.layers[1:]:
            layer.register_forward_hook(lambda module, args, result: result.tanh())
        compare(model, (x,), target=y, loss_fn=mean_square, chunks=8, schedule=name)


class Joins(nn.Module):
    """Each stage joins what crosses, so that the gradients are parts of one tensor, or turned."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12 if at else 6, 6) for at in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        k = x
        for number, layer in enumerate(self.layers):
            with bp.Block(number):
                x = layer(torch.cat([x, k], 1) if number else x)
                k = x.t().tanh().t()
        return x


def gradients_that_are_parts_of_others_are_sent(rank: int, ranks: int) -> None:
    """Under every schedule: gloo sends contiguous tensors only."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    for name, per_rank in SCHEDULES.items():
        model: Any = Joins(ranks * per_rank)
        compare(model, (x,), target=y, loss_fn=mean_square, chunks=8, schedule=name)


class Embeds(nn.Module):
    """Embeds on two stages with one weight; the second one may read it as a matrix, too."""

    def __init__(self, *, is_dense: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Embedding(9, 4, sparse=True) for _ in range(2))
        self.second.weight, self.is_dense = self.first.weight, is_dense

    def forward(self, index: Tensor) -> Tensor:
        with bp.Block(0):
            h = self.first(index)
        with bp.Block(1):
            y = self.second(index) * h
            return y + (h @ self.second.weight.t()).sum(1, keepdim=True) if self.is_dense else y


def sparse_gradients_are_summed(rank: int, ranks: int) -> None:
    """Of a tied weight, of replicas, and of pipelines that share a batch; sparse as in the plain
    loop if all parts are."""
    mesh, index = init_device_mesh("cpu", (ranks, 1)), torch.tensor([1, 5, 5, 7])
    share = index[:2] if rank == 0 else index[2:]
    for is_dense in (False, True):
        plain = Embeds(is_dense=is_dense)
        plain(index).square().mean().backward()
        wanted = plain.first.weight.grad
        options: dict[str, Any] = {"chunks": 2, "schedule": "looped-bfs"}
        models = [Embeds(is_dense=is_dense) for _ in range(3)]
        tied = DistributedPipeline(models[0], sample=index, **options | {"schedule": "1f1b"})
        shares = DistributedPipeline(models[1], sample=share, mesh=mesh, **options)
        whole = ReplicatedPipeline(bp.Pipeline(models[2], devices=["cpu"] * 2, chunks=2))
        for pipe, given in ((tied, index), (shares, share), (whole, share)):
            for _ in range(2):
                pipe.forward_backward(given, loss_fn=lambda output: output.square().mean())
        for model in models:
            found = model.first.weight.grad
            assert found is not None
            assert wanted is not None
            assert found.is_sparse == wanted.is_sparse == (not is_dense)
            torch.testing.assert_close(found.to_dense(), 2 * wanted.to_dense())
