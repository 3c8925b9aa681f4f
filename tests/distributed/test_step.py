"""The loss of a step."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline

from .ranks import NEEDS_SCHEDULES

pytestmark = [
    pytest.mark.cpu("the processes have no simulated accelerator"),
    NEEDS_SCHEDULES,
]


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_of_a_step_has_the_dtype_of_a_micro_batches(dtype: torch.dtype) -> None:
    """As a Pipeline's, and not the default one."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1}).to(dtype)
    x = torch.randn(4, 4, dtype=dtype)
    pipe = DistributedPipeline(net, sample=x, device="cpu", chunks=2, schedule="looped-bfs")
    loss = pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), mse_loss(net(x), x).detach())
