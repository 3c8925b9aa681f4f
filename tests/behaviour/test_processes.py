"""A pipeline in each of several processes, by the functions of docs/how-to/several-gpus.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn

import blockpipe as bp

PAGE = Path(__file__).parents[2] / "docs/how-to/several-gpus.md"
PROCESSES = 2


def net_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    net[0].requires_grad_(False)  # a frozen one has no gradient
    return bp.begin_blocks(net, {"2": 1})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    return torch.randn(24, 8), torch.randint(0, 4, (24,))


def train(rank: int, directory: str) -> None:
    """One process: its own initial weights, and its share of the batch."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    (block,) = re.findall(
        r"```python\n(import torch.distributed as dist\n.*?)```", PAGE.read_text(), re.S
    )
    page: dict[str, Any] = {}
    exec(block, page)
    x, y = (whole.chunk(PROCESSES)[rank] for whole in batch())
    net = net_of(seed=rank)
    pipe = bp.Pipeline(net.eval(), devices=["cpu"] * 2, chunks=3, sample=((x,), {}))
    page["equal_weights"](pipe)
    pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    page["average_gradients"](pipe)
    torch.save([p.grad for p in net.parameters()], f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.cpu("the processes have not imported the simulated accelerator")
def test_gradients_of_two_processes_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    """They are equal in both, and the whole batch's to rounding, from the first one's weights."""
    torch.multiprocessing.spawn(train, (str(tmp_path),), nprocs=PROCESSES)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)]
    x, y = batch()
    net = net_of(seed=0).eval()
    F.cross_entropy(net(x), y).backward()
    for parameter, *gradients in zip(net.parameters(), *found, strict=True):
        if parameter.grad is None:
            assert gradients == [None] * PROCESSES
            continue
        assert torch.equal(*gradients)
        torch.testing.assert_close(gradients[0], parameter.grad, rtol=1e-5, atol=1e-7)
