"""When the copies of a step run, and what makes the host wait."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.transfer import send

from .. import simulated as accelerator
from ..devices import stages

SCHEDULES = ["sequential", "gpipe", "1f1b", "interleaved", "zb-h1"]


def chain(count: int) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    return bp.begin_blocks(net, {str(i): i for i in range(1, count)})


def test_a_copy_begins_when_its_source_is_there():
    """Not behind what was queued on the source's device by the time that it is read elsewhere."""
    device, other = map(torch.device, stages(2))
    source = torch.ones(4, device=device)
    there = torch.accelerator.current_stream(device).record_event()
    torch.accelerator.set_device_index(0)
    accelerator.settle()
    accelerator.set_flags(trace=True)
    accelerator.sleep(100_000)
    moved = send(source, other, after=there).receive()
    moved.add_(1)
    accelerator.settle()
    ends = {name: end for _, _, name, _, end in accelerator.spans()}
    copied = next(end for name, end in ends.items() if name.startswith("copy"))
    assert copied < ends["sleep"]


def test_a_warm_step_waits_for_no_device():
    """Nothing in a step makes the host wait, where the model itself does not."""
    for schedule, checkpoint, where in itertools.product(
        SCHEDULES, ["never", "always"], ["cpu", stages(1)[0]]
    ):
        pipe = bp.Pipeline(
            chain(4), devices=stages(4), chunks=4, schedule=schedule, checkpoint=checkpoint
        )
        x, y = torch.randn(12, 8).to(where), torch.randn(12, 8).to(where)
        for _ in range(2):
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        accelerator.set_flags(raise_syncs=True)
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        accelerator.set_flags()


@pytest.mark.parametrize("at", range(4))
def test_a_stage_on_the_cpu_waits_for_what_comes_to_it_alone(at):
    """Once for each micro-batch's activation, and once for its gradient."""
    devices = stages(4)
    devices[at] = "cpu"
    pipe = bp.Pipeline(chain(4), devices=devices, chunks=4)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    accelerator.settle()
    accelerator.reset()
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    waits = sum(n for what, n in accelerator.counts().items() if what.startswith("sync"))
    assert waits <= 4 * ((at > 0) + (at < 3))
