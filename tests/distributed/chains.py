"""Stages of one model run one after the other in this process, as an engine would run them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockpipe._common.nested import tensors
from blockpipe.distributed.build import CutForward
from blockpipe.distributed.replay import StageModule


def loss_of(output: Any) -> Tensor:
    """A number that every differentiable part of an output has a share in."""
    return torch.stack(
        [t.float().square().mean() for t in tensors(output) if t.requires_grad]
    ).sum()


def run_chain(
    stages: list[StageModule],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any], Tensor] = loss_of,
) -> Tensor:
    """A forward and a backward, stage by stage; checks what each stage says of its tensors."""
    handed = stages[0].arguments(*args, **kwargs)
    inputs, outputs = [], []
    for stage in stages:
        given = tuple(t.detach().requires_grad_(t.requires_grad) for t in handed)
        _check(given, stage.input_metas)
        handed = stage(*given)
        _check(handed, stage.output_metas)
        inputs.append(given)
        outputs.append(handed)
    loss = loss_fn(stages[-1].output(handed))
    loss.backward()
    for made, read in reversed([*zip(outputs[:-1], inputs[1:], strict=True)]):
        pairs = [
            (m, r.grad)
            for m, r in zip(made, read, strict=True)
            if m.requires_grad and r.grad is not None
        ]
        torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
    return loss.detach()


def _check(found: tuple[Tensor, ...], metas: list[Any]) -> None:
    for tensor, meta in zip(found, metas, strict=True):
        assert tuple(tensor.shape) == meta.shape
        assert tensor.dtype == meta.dtype
        assert tensor.requires_grad == meta.requires_grad
        assert tensor.is_contiguous()


def assert_like_plain(model: nn.Module, *args: Any, **kwargs: Any) -> list[StageModule]:
    """Stages give the plain model's loss and gradients, to the bit; returns them."""
    plain = copy.deepcopy(model)
    cut = CutForward(model, args, kwargs)
    stages = [cut.module(index) for index in range(len(cut.stages))]
    torch.manual_seed(0)
    loss = run_chain(stages, args, kwargs)
    torch.manual_seed(0)
    expected = loss_of(plain(*args, **kwargs))
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert weight.grad is None or not weight.grad.any(), name
        else:
            assert weight.grad is not None, name
            assert torch.equal(weight.grad, other.grad), name
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    names = {n for stage in stages for n, _ in stage.named_parameters(remove_duplicate=False)}
    assert names == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    return stages
