"""A loss that writes to its target in place."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blockpipe as bp

from ..models import WITH_INTERLEAVED
from ..parity import difference, plain_step
from ..stage_devices import stages


def _ignoring(output: Tensor, target: Tensor) -> Tensor:
    target[target == 3] = -100
    return cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", [*WITH_INTERLEAVED, "sequential", "uncut"])
def test_a_target_that_the_loss_writes_is_the_micro_batchs_own(
    schedule: str, checkpoint: str
) -> None:
    """The parts of a batch do not count each other's writes."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(stages(1)[0])
    plain = copy.deepcopy(net)
    options = {"chunks": 3, "schedule": schedule, "loss_reduction": "sum"}
    if schedule != "uncut":
        options["checkpoint"] = checkpoint
    pipe = bp.Pipeline(bp.begin_blocks(net, {"2": 1}), devices=stages(2), **options)
    x, target = torch.randn(9, 4), torch.randint(0, 4, (9,))
    loss = pipe.forward_backward(x, target=target.clone(), loss_fn=_ignoring).loss
    where = stages(1)[0]
    expected = sum(
        plain_step(plain, (part.to(where),), {}, goal.to(where), _ignoring, 1)
        for part, goal in zip(x.split(3), target.split(3), strict=True)
    )
    found = difference(net, plain, loss, expected)
    assert found.same, found
