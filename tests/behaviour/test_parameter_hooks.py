"""Hooks of parameters that several hops of one stage read, or that are given to the model: as in the
plain loop, once for each micro-batch, with the sum of the gradients of all reads."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.batches.microbatch import split

from ..parameter_sets import every_pair
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

Calls = dict[str, int]


class Returns(nn.Module):
    """The route comes back to both stages, and layers are called on both hops of each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.calls: Calls = {}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=0):
            h = self.c(h) + self.a(h)
        with bp.Block(stage=1):
            return self.b(h)


def _count(net: Returns, name: str) -> None:
    net.calls[name] = net.calls.get(name, 0) + 1


def _of_tensors(net: Returns, name: str, parameter: Tensor) -> None:
    def hook(gradient: Tensor) -> Tensor:
        _count(net, name)
        return gradient.clamp(-0.01, 0.01)

    parameter.register_hook(hook)


def _behind_the_sum(net: Returns, name: str, parameter: Tensor) -> None:
    def hook(parameter: Tensor) -> None:
        _count(net, name)
        parameter.grad.mul_(0.5)

    parameter.register_post_accumulate_grad_hook(hook)


def _of_nodes(net: Returns, name: str, parameter: Tensor) -> None:
    node = torch.autograd.graph.get_gradient_edge(parameter).node

    def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _count(net, f"before {name}")
        return tuple(gradient.clamp(-0.01, 0.01) for gradient in gradients)

    node.register_prehook(before)
    node.register_hook(lambda *_: _count(net, f"after {name}"))
    net.__dict__.setdefault("_nodes", []).append(node)  # a parameter does not keep its node


def _removed_at_the_third_call(net: Returns, name: str, parameter: Tensor) -> None:
    def hook(gradient: Tensor) -> Tensor:
        _count(net, name)
        if net.calls[name] == 3:
            handle.remove()
        return gradient.clamp(-0.01, 0.01)

    handle = parameter.register_hook(hook)


KINDS = [_of_tensors, _behind_the_sum, _of_nodes, _removed_at_the_third_call]
ENGINES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "zb-h1"},
    {"schedule": "sequential"},
    {"schedule": "uncut"},
    {"schedule": "1f1b", "isolate": True},
    {"schedule": "1f1b", "checkpoint": "always"},
]


def _pair(hooks: Callable[[Returns, str, Tensor], None], **options: object) -> tuple:
    net = Returns()
    plain = copy.deepcopy(net).to(stages(1)[0])  # before it has hooks of nodes, as the other one
    sample = ((torch.randn(8, 4),), {})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, sample=sample, **options)
    for model in (net, plain):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            hooks(model, name, parameter)
    return pipe, net, plain


@every_pair(hooks=KINDS, options=ENGINES)
def test_hooks_of_parameters_of_several_hops_run_once_for_each_micro_batch(hooks, options) -> None:
    """They ran in the backward of each hop, with ``None`` where its graph ended before them."""
    pipe, net, plain = _pair(hooks, **options)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
        assert_same_gradients(net, plain)
    assert net.calls == plain.calls


@pytest.mark.parametrize("hooks", KINDS)
def test_the_callers_own_backward_runs_them_as_often(hooks) -> None:
    """With a loss of the whole output, whose gradient is that of the parts."""
    pipe, net, plain = _pair(hooks)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    output = pipe(x)
    mse_loss(output, y.to(output.device)).backward()
    home = stages(1)[0]
    for batch in split((x.to(home),), {}, y.to(home), 4):
        (mse_loss(plain(*batch.args), batch.target) / 4).backward()
    assert_same_gradients(net, plain)
    assert net.calls == plain.calls


class Given(nn.Module):
    """Its first argument is split, and the second goes whole to every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) + prompt[0]
        with bp.Block(stage=1):
            return self.b(h) * prompt[1]


@every_pair(hooks=KINDS, options=ENGINES)
def test_hooks_of_a_whole_argument_run_once_for_each_micro_batch(hooks, options) -> None:
    """They ran once, with the sum of the micro-batches' gradients."""
    net = Given()
    plain = copy.deepcopy(net)
    x, y, values = torch.randn(8, 4), torch.randn(8, 4), torch.randn(2, 4)
    prompts, counts = [], []
    for _ in range(2):
        prompt, counted = nn.Parameter(values.to(stages(1)[0], copy=True)), Returns()
        prompt.grad = torch.ones_like(prompt)
        hooks(counted, "prompt", prompt)
        prompts.append(prompt)
        counts.append(counted)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    for _ in range(2):
        loss = pipe.forward_backward(x, prompts[0], target=y, loss_fn=mse_loss).loss
        args = (x.to(stages(1)[0]), prompts[1])
        assert_close(loss, plain_step(plain, args, {}, y, mse_loss, 4))
        assert_same_gradients(net, plain)
        assert_close(prompts[0].grad, prompts[1].grad)
    assert counts[0].calls == counts[1].calls != {}
