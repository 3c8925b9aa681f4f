"""On a real accelerator: the same gradients to rounding, streams, placement. Run on a CUDA machine:

python -m pytest -m cuda
"""

import copy

import pytest
import torch
from torch import nn

import blockpipe as bp

from .parity import plain_step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def net(width: int = 64) -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
    return bp.begin_blocks(model, {"1": 1, "2": 2, "3": 3})


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def check(devices, schedule, steps=3):
    model = net()
    plain = copy.deepcopy(model).cuda()
    x, y = torch.randn(30, 64), torch.randn(30, 64)
    pipe = bp.Pipeline(model, devices=devices, chunks=7, schedule=schedule)
    for _ in range(steps):
        loss = pipe.forward_backward(x, target=y, loss_fn=loss_of).loss
        expected = plain_step(plain, (x.cuda(),), {}, y.cuda(), loss_of, 7)
    torch.testing.assert_close(loss.cpu(), expected.cpu())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())
    out = pipe(x)
    loss_of(out, y.to(pipe.output_device)).backward()
    return pipe


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "uncut"])
def test_four_stages_on_one_device(schedule):
    """Stages may share a device."""
    check(["cuda:0"] * 4, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_stages_on_cpu_and_cuda(schedule):
    """Copies to and from the host, in both directions."""
    check(["cpu", "cuda:0", "cpu", "cuda:0"], schedule)


@two
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential", "uncut"])
def test_stages_on_two_devices(schedule):
    """Copies between devices, with events on both sides."""
    pipe = check(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], schedule)
    assert {p.device.index for p in pipe.parameters()} == {0, 1}


def test_unplace_and_optimizer_state():
    """State of an optimizer stepped before the placement moves with its parameters."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    pipe = bp.Pipeline(model, devices=["cuda:0"] * 4, chunks=2)
    pipe.forward_backward(torch.randn(4, 64), target=torch.randn(4, 64), loss_fn=loss_of)
    optimizer.step()
    assert all(p.device.type == "cuda" for p in model.parameters())
    pipe.unplace()
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_custom_stream_of_the_caller():
    """Work queued on the caller's current stream is seen by the stages."""
    model = net()
    pipe = bp.Pipeline(model, devices=["cuda:0"] * 4, chunks=4)
    x = torch.randn(32, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        doubled = x * 2
        out = pipe(doubled)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        torch.testing.assert_close(out, model(x * 2))
