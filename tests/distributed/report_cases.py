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
