"""What several processes run together: Pipeline's words, against a Pipeline in this process."""

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline

from .cases import mean_square
from .models import ids, t5


class Noise(nn.Module):
    """Draws from Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random()) + float(np.random.rand())


def dropping(stages: int, *, python: bool = False) -> nn.Module:
    """Four layers with dropout, and dropout in the glue, on some stages."""
    torch.manual_seed(0)

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(6, 6),
                    nn.BatchNorm1d(6),
                    nn.Tanh(),
                    nn.Dropout(0.5),
                    *([Noise()] if python else []),
                )
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                with bp.Block(number * stages // 4):
                    x = x + nn.functional.dropout(layer(x), 0.25, self.training)
            return x

    return Dropping()


def batch(size: int = 10) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """Draws as well."""
    return mean_square(nn.functional.dropout(output, 0.1), target)


def like_one_process(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Any = None,
    group: Any = None,
    schedule: str = "1f1b",
    **options: Any,
) -> None:
    """Two steps, and a call without gradients, are a Pipeline's in one process: losses, gradients,
    buffers, outputs and the generators' states."""
    kwargs = kwargs or {}
    whole = bp.Pipeline(
        copy.deepcopy(model), devices=["cpu:0"] * 4, schedule="sequential", **options
    )
    seed(7)
    losses = []
    for _ in range(2):
        found = whole.forward_backward(*args, target=target, loss_fn=loss_fn, **kwargs)
        losses.append(found.loss.item())
    with torch.no_grad():
        outputs = whole(*args, **kwargs)
    after = torch.rand(3), random.random(), np.random.rand()
    pipe = DistributedPipeline(
        model, sample=(args, kwargs), group=group, schedule=schedule, **options
    )
    seed(7 if dist.get_rank(group) == 0 else 8)  # that of the first stage counts
    for loss in losses:
        found = pipe.forward_backward(*args, target=target, loss_fn=loss_fn, **kwargs)
        torch.testing.assert_close(found.loss.item(), loss)
    gradients = {name: p.grad for name, p in whole.module.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(pipe(*args, **kwargs), outputs)
    assert torch.equal(torch.rand(3), after[0])
    if any(isinstance(module, Noise) for module in model.modules()):
        assert (random.random(), np.random.rand()) == after[1:]
    expected = whole.module.state_dict()
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def dropout_is_that_of_one_process(rank: int, ranks: int) -> None:
    """With as many stages as there are processes; uneven micro-batches; the loss draws too."""
    x, y = batch()
    model = dropping(ranks, python=True)
    like_one_process(model, (x,), target=y, loss_fn=noisy_loss, chunks=4)


def dropout_on_one_process_and_on_several_stages_each(rank: int, ranks: int) -> None:
    x, y = batch(8)
    given: dict[str, Any] = {"target": y, "loss_fn": noisy_loss, "chunks": 4}
    groups = [dist.new_group([each]) for each in range(ranks)]
    like_one_process(dropping(1), (x,), group=groups[rank], **given)
    if ranks == 2:
        for schedule in ("interleaved", "zb-v", "dualpipe-v"):
            like_one_process(dropping(4), (x,), schedule=schedule, **given)


def dropout_of_an_encoder_and_a_decoder(rank: int, ranks: int) -> None:
    given = {"input_ids": ids(8), "labels": ids(8)}
    schedule = "1f1b" if ranks == 4 else "interleaved"
    like_one_process(t5(0.2), (), given, chunks=4, schedule=schedule)


def recomputation_replays_dropout(rank: int, ranks: int) -> None:
    """And batch norm's running statistics move once."""
    x, y = batch()
    given: dict[str, Any] = {"target": y, "loss_fn": noisy_loss, "chunks": 4}
    like_one_process(dropping(ranks, python=True), (x,), checkpoint="except_last", **given)
    if ranks == 2:
        for schedule in ("zb-v", "zb-h1"):
            like_one_process(dropping(4), (x,), checkpoint="always", schedule=schedule, **given)


class Counted(nn.Module):
    """Counts how often it runs, and runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ran = nn.Linear(6, 6), [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        self.ran[bp.is_recomputing()] += 1
        return torch.tanh(torch.tanh(self.linear(x)))


def micro_batches_are_recomputed_as_they_are_asked_to(rank: int, ranks: int) -> None:
    """All, all but the last, none; and a mark decides for its block."""
    x, y = batch(8)
    for checkpoint, marked, times in (
        ("always", None, 4),
        ("except_last", None, 3),
        ("never", None, 0),
        ("never", True, 4),
        ("always", False, 0),
    ):
        net = nn.Sequential(*[Counted() for _ in range(ranks)])
        for at in range(ranks):
            net[at] = bp.BeginBlock(net[at], stage=at, checkpoint=marked)
        pipe = DistributedPipeline(net, sample=x, chunks=4, checkpoint=checkpoint)
        own = next(m for m in net[rank].modules() if isinstance(m, Counted))
        own.ran[:] = [0, 0]
        pipe.forward_backward(x, target=y, loss_fn=mean_square)
        assert own.ran == [4, times], (checkpoint, marked, own.ran)
        with torch.no_grad():
            pipe(x)
        assert own.ran == [8, times]


def batch_norm_is_deferred(rank: int, ranks: int) -> None:
    """With recomputation, too; between steps the modules are the user's own."""
    x, y = batch()
    given: dict[str, Any] = {"target": y, "loss_fn": mean_square, "chunks": 4}
    for checkpoint in ("never", "always"):
        options = {"deferred_batch_norm": True, "checkpoint": checkpoint, **given}
        model = dropping(ranks)
        like_one_process(model, (x,), **options)
        assert all("forward" not in vars(module) for module in model.modules())
    plain, model = dropping(ranks).eval(), dropping(ranks).eval()
    for each in (plain, model):
        for module in each.modules():
            module.train(isinstance(module, nn.BatchNorm1d))
    pipe = DistributedPipeline(model, sample=x, chunks=2, deferred_batch_norm=True)
    pipe.forward_backward(x, target=y, loss_fn=mean_square)
    plain(x)  # the whole batch in one forward
    found, expected = pipe.state_dict(), plain.state_dict()
    first = "layers.0.1.running_var"  # later ones see what was normalized in parts
    torch.testing.assert_close(found[first], expected[first])


def replicas_draw_other_numbers(rank: int, ranks: int) -> None:
    """From one seed; the second step draws others than the first, and all go on alike."""
    mesh = init_device_mesh("cpu", (ranks, 1))
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5))
    pipe = DistributedPipeline(net, sample=torch.ones(2, 6), mesh=mesh, chunks=2)
    torch.manual_seed(3)
    seen = []
    for _ in range(2):
        with torch.no_grad():
            seen.append(pipe(torch.ones(2, 6)) == 0)
    every = [torch.empty_like(seen[0]) for _ in range(ranks)]
    for each in seen:
        dist.all_gather(every, each)
        assert not torch.equal(every[0], every[1])
        assert not torch.equal(each[0], each[1])  # nor do micro-batches
    assert not torch.equal(seen[0], seen[1])
    drawn = [torch.empty(4) for _ in range(ranks)]
    dist.all_gather(drawn, torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])


def a_failed_step_has_drawn_nothing(rank: int, ranks: int) -> None:
    x, y = batch(8)
    pipe = DistributedPipeline(dropping(ranks), sample=x, chunks=4)
    torch.manual_seed(5)
    try:
        pipe.forward_backward(x, target=y[:3], loss_fn=mean_square)
    except bp.BlockpipeError:
        pass
    else:
        raise AssertionError("not refused")
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
