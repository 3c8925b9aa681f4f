"""The gradients that a backward in the forward adds, and a ``.grad`` that another stage reads."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import CrossingError

from ..models import Scripted
from ..parameter_sets import every_pair
from ..parity import assert_same_gradients, difference, plain_step
from ..stage_devices import assert_close, stages

B = bp.Block


def _noise(net: Scripted, x: Tensor) -> Tensor:
    """Return a leaf whose ``.grad`` is there."""
    noise = torch.zeros_like(x).requires_grad_()
    net.a(x + noise).tanh().sum().backward(inputs=[noise])
    return noise


def on_the_next_stage(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        if noise.grad is not None:
            h = h + 0.1 * noise.grad.sign()
        return net.b(h)


def where_there_is_none(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise = torch.zeros_like(x).requires_grad_()
        h = net.a(x + noise)
    with B(1):
        return net.b(h) if noise.grad is None else h


def on_two_stages_and_at_home(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        h = net.b(h) + noise.grad
    with B(0):
        h = net.c(h) * noise.grad
    with B(2):
        return h + noise.grad.sign()


def written_in_place(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        noise.grad.mul_(3)
        h = net.b(h) + noise.grad
    with B(0):
        return net.c(h) + noise.grad


class Asks(nn.Module):
    def forward(self, h: Tensor, noise: Tensor) -> Tensor:
        return h if noise.grad is None else h * 2


def in_a_module(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        return net.b(net.asks(h, noise))


def in_a_checkpoint(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        return checkpoint(lambda h: net.b(h) * noise.grad, h, use_reentrant=False)


ENGINES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "isolate": True},
    {"schedule": "zb-h1"},
    {"schedule": "sequential"},
    {"schedule": "uncut"},
]


def _net(script: Callable[[Scripted, Tensor], Tensor]) -> Scripted:
    net = Scripted(script)
    net.asks = Asks()
    return net


@every_pair(
    script=[
        on_the_next_stage,
        where_there_is_none,
        on_two_stages_and_at_home,
        written_in_place,
        in_a_module,
        in_a_checkpoint,
    ],
    options=ENGINES,
)
def test_the_grad_of_a_tensor_of_another_stage_is_the_plain_loops(script, options) -> None:
    """A copy of the tensor had none, and the forward took another branch without a word."""
    net = _net(script)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, **options)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


def with_a_loss_of_its_own(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        h = net.a(x).tanh()
        h.square().mean().backward(retain_graph=True)
    with B(1):
        return net.b(h)


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_a_loss_of_one_stage_adds_the_plain_loops_gradients(options) -> None:
    """To the bit one by one; else ``.grad`` gets them in another order."""
    net = _net(with_a_loss_of_its_own)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    expected = plain_step(plain, (x,), {}, y, mse_loss, 4)
    assert_same_gradients(net, plain)
    if options["schedule"] in ("sequential", "uncut"):
        assert difference(net, plain, loss, expected).same


def of_a_parameter(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        h = net.a(x)
    with B(1):
        scale = 1.0 if net.a.weight.grad is None else net.a.weight.grad.norm()
        return net.b(h) * scale


@pytest.mark.parametrize("schedule", ["sequential", "uncut"])
def test_the_grad_of_a_parameter_of_another_stage_is_the_plain_loops(schedule: str) -> None:
    """It was ``None`` there, also where micro-batches run one by one."""
    net = _net(of_a_parameter)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


def assigned(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        noise, h = _noise(net, x), net.a(x)
    with B(1):
        noise.grad = None
        return net.b(h)


def of_what_crossed(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        h = net.a(x)
    with B(1):
        net.b(h).sum().backward(inputs=[h], retain_graph=True)
        return h + h.grad


def of_a_tied_parameter(net: Scripted, x: Tensor) -> Tensor:
    with B(0):
        h = net.a(x)
    with B(1):
        (h.detach() @ net.a.weight).sum().backward(inputs=[net.a.weight])
        return net.b(h)


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (assigned, r"an assignment to \.grad on stage 1 .*test_inner_gradients\.py:\d+"),
        (of_what_crossed, "comes to where a tensor crossed.*schedule='uncut'"),
        (of_a_tied_parameter, "comes to where a tensor crossed.*schedule='uncut'"),
    ],
)
def test_gradients_in_the_forward_that_span_stages_are_refused(script, match: str) -> None:
    """A copy would have got them, and the tensor itself nothing."""
    pipe = bp.Pipeline(_net(script), devices=stages(3), chunks=4)
    with pytest.raises(CrossingError, match=match):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


@pytest.mark.parametrize("script", [assigned, of_what_crossed, of_a_tied_parameter])
def test_they_run_in_one_graph(script) -> None:
    net = _net(script)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="uncut")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    plain_step(plain, (x,), {}, y, mse_loss, 4)
    assert_same_gradients(net, plain)
