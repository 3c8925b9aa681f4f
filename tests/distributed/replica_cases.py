"""What several processes run together: a Pipeline in each, with a share of the batch."""

import copy
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import blockpipe as bp
from blockpipe.distributed import ReplicatedPipeline

from .cases import deep, mean_square
from .models import gpt, ids


def shares_are_the_whole_batch(rank: int, ranks: int) -> None:
    """Of different sizes, on several schedules, two steps; weights begin as the first has them."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 6, generator=generator), torch.randn(10, 6, generator=generator)
    index = torch.randint(0, 5, (10,), generator=generator)
    for schedule in ("1f1b", "zb-h1", "sequential"):
        model = deep(3)
        plain = copy.deepcopy(model)
        if rank:
            with torch.no_grad():
                model.layers[0].weight.add_(1)
        pipe = bp.Pipeline(model, devices=["cpu"] * 3, chunks=2, schedule=schedule)
        mesh = init_device_mesh("cpu", (ranks,))
        shared = ReplicatedPipeline(pipe, mesh=mesh)
        share = slice(0, 6) if rank == 0 else slice(6, 10)
        for _ in range(2):
            given: dict[str, Any] = {"target": y[share], "loss_fn": mean_square}
            found = shared.forward_backward(x[share], index[share], **given)
            loss = mean_square(plain(x, index), y)
            loss.backward()
            torch.testing.assert_close(found.loss.item(), loss.item())
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            wanted = expected[name].grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


def the_last_stage_is_summed_while_the_first_runs(rank: int, ranks: int) -> None:
    """In every process in one order; a profile is told of the step as well."""
    net = nn.Sequential(*[nn.Linear(60, 60) for _ in range(3)])
    bp.begin_blocks(net, {"1": 1, "2": 2})
    x = torch.randn(64, 60)
    pipe = bp.Pipeline(net, devices=["cpu"] * 3, chunks=4, sample=((x,), {}))
    for prepared in pipe._preparer.known.values():
        prepared.__dict__["is_small"] = False  # a thread for each stage
    shared = ReplicatedPipeline(pipe)
    calls = 0

    def wait(_: torch.Tensor) -> None:
        """In the first stage's last backward, for the last stage's sum."""
        nonlocal calls
        calls += 1
        ends = time.monotonic() + 60
        while calls == 4 and not (shared.sums and shared.sums.order) and time.monotonic() < ends:
            time.sleep(0.01)

    net[0].weight.register_hook(wait)
    for _ in range(2):
        calls = 0
        with shared.pipe.profile() as timeline:
            shared.forward_backward(x, loss_fn=lambda out: out.square().mean())
        assert shared.sums is not None
        assert [hops for hops, _ in shared.sums.order] == [(2,), (1,), (0,)]
        assert not shared.sums.order[0][1]
        assert timeline.actions()


def a_tied_weight_waits_for_all_its_stages(rank: int, ranks: int) -> None:
    """And the model's own loss counts."""
    model, plain = gpt(), gpt()
    given = {"input_ids": ids(8), "labels": ids(8)}
    shared = ReplicatedPipeline(bp.Pipeline(model, devices=["cpu"] * 4, chunks=2))
    share = {name: tensor.chunk(ranks)[rank] for name, tensor in given.items()}
    found = shared.forward_backward(**share)
    loss = plain(**given).loss
    loss.backward()
    torch.testing.assert_close(found.loss.item(), loss.item())
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
    assert shared.sums is not None
    assert [hops for hops, _ in shared.sums.order] == [(2,), (1,), (0,), (0, 3)]


def a_failed_step_ends(rank: int, ranks: int) -> None:
    """In all processes alike, and the next one works."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))

    def fails(output: Any) -> Any:
        raise ValueError("no luck")

    try:
        shared.forward_backward(torch.ones(4, 4), loss_fn=fails)
    except ValueError as error:
        assert "no luck" in str(error)
    else:
        raise AssertionError("it went on")
    shared.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
