"""What several processes run together: reports, which are the same in each."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline
from blockpipe.distributed.reporting import clock

from .cases import mean_square
from .models import gpt, ids
from .words_cases import batch, dropping


def everywhere(value: Any) -> list[Any]:
    """The value of each process."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def a_summary_is_the_same_in_every_process(rank: int, ranks: int) -> None:
    given = {"input_ids": ids(8), "labels": ids(8)}
    pipe = DistributedPipeline(gpt(), sample=((), given), chunks=4, schedule="interleaved")
    found = pipe.summary(depth=1)
    assert len(set(everywhere(str(found)))) == 1
    assert [stage.device for stage in found.stages] == [f"rank {k}, cpu" for k in (0, 1, 0, 1)]
    whole = bp.Pipeline(gpt(), devices=["cpu"] * 4, chunks=4).summary(**given)
    assert [s.parameters for s in found.stages] == [s.parameters for s in whole.stages]
    assert "interleaved, 4 micro-batches" in str(found)
    try:
        pipe.summary(depth=-1)
    except bp.BlockpipeError as error:
        what = "depth" if rank == 0 else "rank 0 failed"
        assert what in str(error), str(error)
    else:
        raise AssertionError("not refused")


def a_timeline_has_all_processes(rank: int, ranks: int) -> None:
    """Each micro-batch's actions follow one another on one clock."""
    x, y = batch()
    for schedule, stages, kinds in (("1f1b", ranks, "FB"), ("zb-v", 2 * ranks, "FBW")):
        pipe = DistributedPipeline(dropping(stages), sample=x, chunks=4, schedule=schedule)
        with pipe.profile() as timeline:
            pipe.forward_backward(x, target=y, loss_fn=mean_square)
            with torch.no_grad():
                pipe(x)
        texts = everywhere(timeline.to_dict())
        assert all(text == texts[0] for text in texts)
        assert [lane.name for lane in timeline.lanes] == [f"rank {k}, cpu" for k in range(ranks)]
        assert len(timeline.steps) == 2
        assert timeline.steps[1].forward_only
        assert {event.kind for event in timeline.actions(0)} == set(kinds)
        at = {(e.step, e.kind, e.hop, e.microbatch): e for e in timeline.events}
        forwards = [key for key in at if key[1] == "F"]
        assert len(forwards) == 2 * stages * 4
        for step, kind, hop, m in forwards:
            after = at.get((step, kind, hop + 1, m))
            assert after is None or at[step, kind, hop, m].end <= after.start
            if step == 0:
                assert at[0, "F", hop, m].end <= at[0, "B", hop, m].start
        assert "rank 1" in timeline.gantt()
        timeline.to_html()


def clocks_of_two_machines_are_compared(rank: int, ranks: int) -> None:
    """The second one's is an hour ahead; a second is more than any question takes."""
    hour = 3600 * 10**9 if rank else 0
    now = SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + hour)
    with mock.patch.multiple(clock, _machine=lambda: str(rank), time=now):
        found = clock.offset_to_first(None, torch.device("cpu"))
    assert abs(found + hour) < 10**9, found


class Wrong(torch.autograd.Function):
    """The gradient is wrong where stages are replayed in more than one process."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * Wrong.factor


class Suspect(nn.Module):
    """A layer, whose gradient is wrong in the second process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Wrong.apply(self.linear(x))


def a_step_is_verified_against_one_process(rank: int, ranks: int) -> None:
    """With dropout, recomputation and deferred batch norm; nothing is changed by it."""
    x, y = batch()
    options: dict[str, Any] = {"checkpoint": "always", "deferred_batch_norm": True, "chunks": 4}
    pipe = DistributedPipeline(dropping(ranks, python=True), sample=x, **options)
    torch.manual_seed(3)
    pipe.forward_backward(x, target=y, loss_fn=mean_square)
    before = {n: t.clone() for n, t in pipe.state_dict().items()}
    gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    assert {d.kind for d in found.differences} == {"outputs", "loss", "gradients", "buffers"}
    assert len(set(everywhere(str(found)))) == 1
    assert torch.equal(torch.get_rng_state(), state)
    after = pipe.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    now = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))


def a_tied_model_is_verified(rank: int, ranks: int) -> None:
    """Its own loss; on the meta device before."""
    given = {"input_ids": ids(8), "labels": ids(8)}
    pipe = DistributedPipeline(gpt(), sample=((), given), chunks=4, schedule="interleaved")
    found = pipe.verify(**given)
    assert found.ok, str(found)


def a_difference_is_found(rank: int, ranks: int) -> None:
    """And named, in every process."""
    net = nn.Sequential(*[Suspect() for _ in range(ranks)])
    bp.begin_blocks(net, {str(at): at for at in range(1, ranks)})
    x, y = batch(8)
    pipe = DistributedPipeline(net, sample=x, chunks=4)
    assert pipe.verify(x, target=y, loss_fn=F.mse_loss).ok
    Wrong.factor = 1.0 if rank == 0 else 1.5
    found = pipe.verify(x, target=y, loss_fn=F.mse_loss)
    Wrong.factor = 1.0
    assert not found.ok
    worst = found.worst["gradients"]
    assert worst.verdict == "different"


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every other sample is a negative."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def layers(ranks: int, *more: nn.Module) -> nn.Module:
    """A layer on each stage, and other modules with the last one."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(ranks)]
    made[-1].extend(more)
    net = nn.Sequential(*made)
    return bp.begin_blocks(net, {str(at): at for at in range(1, ranks)})


def a_step_is_compared_with_the_whole_batch(rank: int, ranks: int) -> None:
    """In evaluation mode where a mode matters; the report is the same in every process."""
    x, y = batch()
    pipe = DistributedPipeline(layers(ranks), sample=x, chunks=4)
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.whole is not None
    assert found.ok, str(found)
    assert {d.kind for d in found.whole.differences} == {"outputs", "loss", "gradients"}
    assert found.whole.notes == []
    assert len(set(everywhere(str(found)))) == 1
    assert pipe.verify(x, target=y, loss_fn=mean_square, whole=False).whole is None
    listed = DistributedPipeline(layers(ranks), sample=x, chunks=4, batch_dims={"output": None})
    found = listed.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    pipe = DistributedPipeline(dropping(ranks, python=False), sample=x, chunks=4)
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    assert found.whole is not None
    assert "evaluation mode" in found.whole.notes[0]
    assert all(module.training for module in pipe.module.modules())
    pipe = DistributedPipeline(dropping(ranks, python=True), sample=x, chunks=4)
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.whole is None
    assert found.notes == [
        "not compared with the whole batch: the forward draws random numbers in evaluation mode too"
    ]


def another_step_than_the_whole_batchs_has_its_cause(rank: int, ranks: int) -> None:
    """A loss of all samples, a wrong weight, a wrong split, batch norm; a note where it fails."""
    x, y = batch(8)
    pipe = DistributedPipeline(layers(ranks), sample=x, chunks=4)
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    for other, loss_fn, cause in (
        (pipe, contrastive, "a loss that needs the whole batch"),
        (pipe, lambda out, y: mean_square(out, y) * len(out), "loss_reduction"),
        (
            DistributedPipeline(layers(ranks, Centered()), sample=x, chunks=4),
            mean_square,
            "several samples at once",
        ),
        (
            DistributedPipeline(layers(ranks, norm), sample=x, chunks=4),
            mean_square,
            "batch norm without running statistics",
        ),
    ):
        found = other.verify(x, target=y, loss_fn=loss_fn)
        assert found.is_plain, str(found)
        assert found.whole is not None
        assert not found.ok
        assert cause in str(found.whole.cause), str(found)

    def few(output: Tensor, target: Tensor) -> Tensor:
        if len(output) > 2:
            raise ValueError("too many")
        return mean_square(output, target)

    found = pipe.verify(x, target=y, loss_fn=few)
    assert found.ok
    assert found.notes == [
        "not compared with the whole batch: its forward fails (ValueError: too many)"
    ]
    pipe.forward_backward(x, target=y, loss_fn=mean_square)


class Centered(nn.Module):
    """Looks at all samples of a micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Doubling(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


def what_a_step_writes_to_is_copied(rank: int, ranks: int) -> None:
    """The arguments, and the gradients of a loss that has parameters."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return mean_square(output * self.scale, target)

    x, y = batch(8)
    net = nn.Sequential(Doubling(), layers(ranks))
    bp.begin_blocks(net, {})
    before, loss_fn = x.clone(), Scaled()
    pipe = DistributedPipeline(net, sample=x, chunks=4)
    found = pipe.verify(x, target=y, loss_fn=loss_fn)
    assert found.ok, str(found)
    assert torch.equal(x, before)
    assert loss_fn.scale.grad is None


def numbers_of_another_mode_than_the_samples_are_verified(rank: int, ranks: int) -> None:
    """The sample was recorded without dropout."""
    x, y = batch(8)
    pipe = DistributedPipeline(dropping(ranks).eval(), sample=x, chunks=4)
    pipe.train()
    state = torch.get_rng_state()
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    assert torch.equal(torch.get_rng_state(), state)
