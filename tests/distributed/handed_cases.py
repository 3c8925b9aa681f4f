"""What several processes run together: gradients and state that are not dense tensors."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, ReplicatedPipeline
from blockpipe.errors import UsageError

from .cases import SCHEDULES, batch_of, compare, deep, mean_square


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


class Averages(nn.Module):
    """A layer with a buffer that each forward replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        for at, dtype in enumerate((torch.int16, torch.bool, torch.complex64)):
            self.register_buffer(f"kind{at}", torch.ones((at,) * at, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (self.mean + x.detach().mean(0)) / 2
        self.kind0 += 1
        y: Tensor = self.layer(x)
        return y.tanh()


def a_pipeline_that_is_cut_elsewhere_goes_on_with_the_trained_values(rank: int, ranks: int) -> None:
    """And the first one does after the second one's steps."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*[Averages() for _ in range(2 * ranks)]), torch.randn(8, 6)
    plain = copy.deepcopy(net)

    def step(model: Any, pipe: Any) -> None:
        optimizer = torch.optim.SGD((pipe or model).parameters(), lr=0.5)
        if pipe is not None:
            pipe.forward_backward(x, loss_fn=lambda output: output.square().mean())
        for part in x.chunk(4) if pipe is None else ():
            (model(part).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    def pipe_of(shift: int) -> DistributedPipeline:
        begins = [bp.Assignment(str(stage + shift), 0, stage) for stage in range(1, ranks)]
        plan = bp.StagePlan(begins, partial=True)
        return DistributedPipeline(net, sample=x, chunks=4, plan=plan)

    first = pipe_of(0)
    step(net, first)
    second = pipe_of(ranks)
    for pipe in (second, first, second):
        step(net, pipe)
    for _ in range(4):
        step(plain, None)
    for pipe in (first, second):
        torch.testing.assert_close(pipe.state_dict(), dict(plain.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(second(x[:4]), plain(x[:4]))


class Task(nn.Module):
    """A head over an encoder that another one has, too, with the second stage at one of three."""

    def __init__(self, encoder: nn.Sequential, begins: int) -> None:
        super().__init__()
        self.encoder, self.head, self.begins = encoder, nn.Linear(6, 6), begins

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate((*self.encoder, self.head)):
            with bp.Block(int(at >= self.begins)):
                x = layer(x)
        return x


def two_pipelines_that_train_a_layer_on_two_ranks_are_refused(rank: int, ranks: int) -> None:
    """In all processes: neither has the whole gradient, nor the values of both."""
    if ranks != 2:
        return
    torch.manual_seed(0)
    encoder, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    pipes = [DistributedPipeline(Task(encoder, at), sample=x, chunks=2) for at in (1, 2)]
    pipes[0].forward_backward(x, loss_fn=torch.sum)
    with pytest.raises(UsageError, match=r"no gradient of 'encoder\.1\.weight' on rank 1"):
        pipes[1].forward_backward(x, loss_fn=torch.sum)
    pipes[0].zero_grad()
    pipes[1].forward_backward(x, loss_fn=torch.sum)
    with torch.no_grad():
        encoder[1].weight.mul_(rank + 2)  # each has an optimizer of its own
    with pytest.raises(UsageError, match=r"'encoder\.1\.weight' to be trained in one process"):
        pipes[0].state_dict()


def a_gradient_that_was_left_before_its_layer_was_frozen_is_no_step_s(
    rank: int, ranks: int
) -> None:
    """No step adds to it, so that a second pipeline with the layer elsewhere can run."""
    if ranks != 2:
        return
    torch.manual_seed(0)
    encoder, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(8, 6)
    pipes = [DistributedPipeline(Task(encoder, at), sample=x, chunks=2) for at in (1, 2)]
    pipes[0].forward_backward(x, loss_fn=torch.sum)
    encoder[1].requires_grad_(False)
    pipes[1].forward_backward(x, loss_fn=torch.sum)


def _squares(output: Tensor) -> Tensor:
    return output.square().mean()


class Late(nn.Module):
    """A layer whose first forward registers a buffer, which later ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        y: Tensor = self.layer(x + self.mean)
        return y.tanh()


class Cut(nn.Module):
    """Layers that are cut in two."""

    def __init__(self, layers: nn.ModuleList, begins: int) -> None:
        super().__init__()
        self.layers, self.begins = layers, begins

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            with bp.Block(int(at >= self.begins)):
                x = layer(x)
        return x


def a_second_pipeline_goes_on_with_a_buffer_that_the_first_ones_forward_registered(
    rank: int, ranks: int
) -> None:
    """If it is cut at the same modules; else no process has what it would read."""
    if ranks != 2:
        return
    torch.manual_seed(0)
    layers, x = nn.ModuleList([Late() for _ in range(4)]), torch.randn(8, 6)
    plain = Cut(copy.deepcopy(layers), 2)
    for _ in range(2):
        pipe = DistributedPipeline(Cut(layers, 2), sample=x, chunks=2)
        result = pipe.forward_backward(x, loss_fn=_squares)
        expected = torch.stack([_squares(plain(part)) for part in x.chunk(2)]).mean()
        torch.testing.assert_close(result.loss, expected.detach())
        torch.testing.assert_close(pipe.state_dict(), dict(plain.state_dict()))
    with pytest.raises(UsageError, match=r"'layers\.1\.mean' in each process"):
        DistributedPipeline(Cut(layers, 1), sample=x, chunks=2)


def weights_that_a_second_pipeline_is_given_are_its_own(rank: int, ranks: int) -> None:
    """Whatever the first one has trained."""
    if ranks != 2:
        return
    torch.manual_seed(0)
    layers, x = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]), torch.randn(8, 6)
    plain = Cut(nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]), 2)
    first = DistributedPipeline(Cut(layers, 2), sample=x, chunks=2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5)
    first.forward_backward(x, loss_fn=_squares)
    optimizer.step()
    optimizer.zero_grad()
    for begins in (1, 3):
        given = {name: value.clone() for name, value in plain.state_dict().items()}
        pipe = DistributedPipeline(Cut(layers, begins), sample=x, chunks=2, weights=given)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x))


def what_a_pipeline_of_one_process_has_had_all_processes_take_together(
    rank: int, ranks: int
) -> None:
    """Only that process knows of it."""
    if ranks != 2:
        return
    torch.manual_seed(0)
    layers, x = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]), torch.randn(8, 6)
    pipe = DistributedPipeline(Cut(layers, 2), sample=x, chunks=2)
    first = dist.new_group([0])
    if rank == 0:
        alone = DistributedPipeline(Cut(layers[:2], 4), sample=x, chunks=2, group=first)
        alone.forward_backward(x, loss_fn=_squares)
        alone.zero_grad()
    expected = {name: value.clone() for name, value in Cut(layers, 2).state_dict().items()}
    torch.testing.assert_close(pipe.state_dict(), expected)
    loss = pipe.forward_backward(x, loss_fn=_squares).loss
    torch.testing.assert_close(loss, _squares(Cut(layers, 2)(x)).detach())


def a_scaler_that_all_share_skips_a_step_in_all(rank: int, ranks: int) -> None:
    """If the gradients of one stage are no numbers."""
    torch.manual_seed(0)
    args, target = batch_of(8)
    net = deep(ranks)
    pipe = DistributedPipeline(net, sample=args, chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(mean_square(output, target))

    if rank == ranks - 1:
        scaler.scale(torch.zeros(()))  # it makes its factor where it is first used
    for bad in (False, True):
        optimizer.zero_grad()
        pipe.forward_backward(*args, target=target, loss_fn=loss_fn)
        before = [p.detach().clone() for p in pipe.parameters()]
        if rank != ranks - 1:
            scaler.scale(torch.zeros(()))
        if bad and rank == 0:
            next(iter(pipe.parameters())).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True)]
        assert all(same) if bad else not any(same)
    assert scaler.get_scale() == 4.0
