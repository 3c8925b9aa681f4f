"""What processes compare before a step."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, engines, kinds
from blockpipe.distributed.kinds import modes_in_words

from . import ranks


def test_modes_of_shared_parts_are_counted_once() -> None:
    """As ``modules()`` and ``parameters()`` count them, in one order in each process."""
    shared, frozen = nn.Linear(2, 2), nn.Linear(2, 2, bias=False).requires_grad_(False)
    net = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout().eval()))
    words = modes_in_words(net)
    assert words["trained parameters"] in ("2 yes, 1 no", "1 no, 2 yes")
    counted = [int(run.split()[0]) for run in words["modules in training mode"].split(", ")]
    assert sum(counted) == len([*net.modules()])
    again = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout()))
    assert modes_in_words(again)["modules in training mode"] == "5 yes"


def test_modes_of_a_deep_model_take_few_calls() -> None:
    """Each step asks for them in every process."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(100)])
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        modes_in_words(net)
    finally:
        sys.setprofile(before)
    assert calls < 2 * len([*net.modules()])


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@ranks.NEEDS_SCHEDULES
def test_a_sharded_stage_is_refused_at_once() -> None:
    """Before it is recorded, and before a step if it was sharded later."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    x = torch.ones(8, 4)
    options: dict[str, Any] = {"device": "cpu", "chunks": 4, "schedule": "looped-bfs"}
    pipe = DistributedPipeline(net, sample=x, **options)
    fully_shard(net[1], mesh=init_device_mesh("cpu", (1,)))
    said = r"got fully_shard on module '1' \(.*test_kinds\.py.*leave it out"
    with pytest.raises(bp.BlockpipeError, match=said):
        pipe.forward_backward(x, loss_fn=torch.sum)
    with pytest.raises(bp.BlockpipeError, match=said):
        DistributedPipeline(net, sample=x, **options)


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@ranks.NEEDS_SCHEDULES
def test_a_step_looks_at_the_modes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its micro-batches have two sizes, and so two engines."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    options: dict[str, Any] = {"device": "cpu", "chunks": 3, "schedule": "looped-bfs"}
    pipe = DistributedPipeline(net, sample=torch.ones(8, 4), **options)
    looked = []

    def look(model: nn.Module) -> dict[str, str]:
        looked.append(model)
        return modes_in_words(model)

    monkeypatch.setattr(engines, "modes_in_words", look)
    monkeypatch.setattr(kinds, "modes_in_words", look)
    pipe.forward_backward(torch.ones(8, 4), loss_fn=torch.sum)
    assert looked == [net]
    net.eval()
    with torch.no_grad():
        found = pipe(torch.ones(8, 4))
        torch.testing.assert_close(found, net(torch.ones(8, 4)))  # recorded anew, with no dropout
    assert looked == [net, net]
