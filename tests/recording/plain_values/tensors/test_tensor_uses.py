"""Tensors, and gradients of parameters, that hooks of one stage write and other code reads."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import stages

SHARED = torch.ones(4)
TABLE = [torch.ones(4), torch.ones(4)]


class Net(nn.Module):
    """Two layers on two stages; the second one multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = torch.ones(4)
        self.register_buffer("factor", torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
                self.average.lerp_(h.mean(0), 0.1)
        with bp.Block(stage=1):
            return self.b(h * self.factor)


def _attribute(net: Net) -> None:
    net.a.weight.register_hook(lambda gradient: gradient * net.kept)
    net.b.weight.register_hook(lambda gradient: net.kept.copy_(gradient.mean(0)) and None)


def _global(net: Net) -> None:
    def writes(gradient: Tensor) -> None:
        SHARED[0] = gradient.norm()

    net.a.weight.register_hook(lambda gradient: gradient * SHARED)
    net.b.weight.register_hook(writes)


def _out(net: Net) -> None:
    def writes(gradient: Tensor) -> None:
        torch.mean(gradient, 0, out=TABLE[1])

    net.a.weight.register_hook(lambda gradient: gradient * TABLE[1])
    net.b.weight.register_hook(writes)


def _adds_on_both(net: Net) -> None:
    def adds(gradient: Tensor) -> None:
        net.kept += gradient.mean(0)

    net.a.weight.register_hook(adds)
    net.b.weight.register_hook(adds)


def _buffer_of_another_stage(net: Net) -> None:
    def hook(module: nn.Module, given: object, got: tuple[Tensor]) -> None:
        net.factor.mul_(0.5)

    net.a.register_full_backward_hook(hook)


def _reads_what_the_forward_writes(net: Net) -> None:
    net.a.weight.register_hook(lambda gradient: gradient * net.mean)


def _finds_by_path(net: Net) -> None:
    net.a.weight.register_hook(lambda gradient: gradient * net.get_buffer("mean").sum().item())


def _finds_in_state(net: Net) -> None:
    net.b.weight.register_hook(lambda gradient: gradient * net.state_dict()["mean"].sum().item())


def _finds_by_class(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        return gradient * next(m for m in net.modules() if isinstance(m, Net)).average.sum().item()

    net.b.weight.register_hook(hook)


def _another_gradient(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        other = 1.0 if net.b.weight.grad is None else net.b.weight.grad.norm()
        return gradient * other

    net.a.weight.register_hook(hook)


def _scales_another_gradient(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        if net.a.bias.grad is not None:
            net.a.bias.grad.mul_(0.5)

    net.b.weight.register_post_accumulate_grad_hook(hook)


def _drops_another_gradient(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        net.a.bias.grad = None

    net.b.weight.register_post_accumulate_grad_hook(hook)


def _all_gradients(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        found = [p.grad for _, (_, p) in enumerate(net.named_parameters()) if p.grad is not None]
        return gradient * (1 + len(found))

    net.a.weight.register_hook(hook)


def _sums_all_gradients(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        for layer in net.children():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    gradient = gradient * parameter.grad.norm()
        return gradient

    net.a.weight.register_hook(hook)


X = torch.randn(8, 4)


def _step(net: Net, **options: object) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.every
@pytest.mark.parametrize(
    ("hook", "what"),
    [
        (_attribute, r"a tensor of shape \(4,\) in a backward on hops \[1\]"),
        (_global, r"a tensor of shape \(4,\) in a backward on hops \[1\]"),
        (_out, r"a tensor of shape \(4,\) in a backward on hops \[1\]"),
        (_adds_on_both, r"a tensor of shape \(4,\) in a backward on hops \[0, 1\]"),
        (_buffer_of_another_stage, r"buffer 'factor' in a backward on hops \[0\]"),
        (_reads_what_the_forward_writes, r"buffer 'mean' on hops \[0\]"),
        (_finds_by_path, r"buffer 'mean' on hops \[0\]"),
        (_finds_in_state, r"buffer 'mean' on hops \[0\]"),
        (_finds_by_class, r"buffer 'average' on hops \[0\]"),
        (_another_gradient, r"the \.grad of 'b\.weight' in a backward on hops \[1\]"),
        (_all_gradients, r"the \.grad of 'b\.\w+' in a backward on hops \[1\]"),
        (_sums_all_gradients, r"the \.grad of 'b\.\w+' in a backward on hops \[1\]"),
        (_scales_another_gradient, r"the \.grad of 'a\.bias' in a backward on hops \[0, 1\]"),
        (_drops_another_gradient, r"the \.grad of 'a\.bias' in a backward on hops \[0, 1\]"),
    ],
)
def test_a_tensor_that_a_hook_shares_with_other_code_is_refused(
    hook: Callable[[Net], None], what: str
) -> None:
    """Which micro-batch's value was there depended on timing."""
    net = Net()
    hook(net)
    with pytest.raises(
        StateError, match=rf"{what} \(.*, and reads it .*uses\.py|{what} \(.*uses\.py"
    ):
        _step(net)


def _clips_its_own(net: Net) -> None:
    def hook(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.1, 0.1)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def _of_one_stage(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        net.kept.mul_(0.9).add_(gradient.mean(0))
        other = 1.0 if net.b.bias.grad is None else net.b.bias.grad.norm()
        return gradient * net.kept * other

    net.b.weight.register_hook(hook)


def _each_its_own(net: Net) -> None:
    def hook(index: int, gradient: Tensor) -> Tensor:
        table[index].add_(gradient.mean(0))
        return gradient * table[index]

    table = [torch.ones(4, device=layer.weight.device) for layer in (net.a, net.b)]
    net.a.weight.register_hook(lambda gradient: hook(0, gradient))
    net.b.weight.register_hook(lambda gradient: hook(1, gradient))


def _reads_weights(net: Net) -> None:
    net.a.bias.register_hook(lambda gradient: gradient + 0.1 * net.a.bias.detach())


@pytest.mark.every
@pytest.mark.cpu("the hooks' tensors are on the CPU")
@pytest.mark.parametrize("hook", [_clips_its_own, _of_one_stage, _each_its_own, _reads_weights])
def test_tensors_that_hooks_of_one_stage_share_are_fine(hook: Callable[[Net], None]) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    for model in (net, plain):
        hook(model)
    _step(net)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


@pytest.mark.cpu("a hook reads a gradient that is on another device")
def test_a_tensor_that_hooks_share_is_the_plain_loops_one_by_one() -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        _another_gradient(model)
    _step(net, schedule="sequential")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)
