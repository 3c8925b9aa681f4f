"""Models and helpers of several test files."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp

from ..stage_devices import assert_close, equal, host, stages

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def deferred(model: nn.Module, marks: dict[str, int], **options: Any) -> bp.Pipeline:
    bp.begin_blocks(model, marks)
    devices = stages(max(marks.values(), default=0) + 1)
    return bp.Pipeline(model, devices=devices, deferred_batch_norm=True, **options)


def net(channels: int = 3, dims: int = 1, **options: Any) -> nn.Sequential:
    """A batch norm on each of two stages; the first one sees the batch as it is."""
    kind = NORMS[dims]
    return nn.Sequential(
        kind(channels, **options), nn.Tanh(), kind(channels, **options), nn.Flatten()
    )


def assert_as_full_batch(pipelined: nn.Module, before: nn.Module, x: Tensor) -> None:
    """A batch norm that saw a batch in parts has the statistics of one that saw it whole, in double
    precision: in single precision torch's own are off by 4e-6 where the mean is 10,000."""
    full = copy.deepcopy(before).double().train()
    full(x.double())
    mean, variance = full.running_mean.float(), full.running_var.float()
    assert_close(pipelined.running_mean, mean, rtol=1e-6, atol=1e-6 * float(x.std()))
    assert_close(pipelined.running_var, variance, rtol=1e-6, atol=0)
    assert equal(pipelined.num_batches_tracked, full.num_batches_tracked)


class Watch:
    """What each batch norm of a model got, and what its statistics should be after a step."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {
            path: copy.deepcopy(m)
            for path, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }
        self.model = model
        self.seen: dict[str, list[Tensor]] = {path: [] for path in self.before}
        for path in self.before:
            model.get_submodule(path).register_forward_pre_hook(partial(self.see, path))

    def see(self, path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if bp.current_microbatch() is not None:
            self.seen[path].append(host(args[0]).double())

    def check(self) -> None:
        for path, old in self.before.items():
            if not old.training:
                continue
            new = self.model.get_submodule(path)
            x = torch.cat(self.seen[path]).transpose(0, 1).flatten(1)
            assert int(new.num_batches_tracked) == int(old.num_batches_tracked) + 1
            factor = 1 / int(new.num_batches_tracked) if old.momentum is None else old.momentum
            for name, now in (("running_mean", x.mean(1)), ("running_var", x.var(1))):
                was = getattr(old, name).double()
                expected = (host(was) + factor * (now - host(was))).to(new.running_mean.dtype)
                assert_close(getattr(new, name), expected, rtol=1e-6, atol=1e-6)


class Body(nn.Module):
    """A sealed module that may compute what it holds twice, or fail."""

    def __init__(self, body: nn.Module, recompute: str = "") -> None:
        super().__init__()
        self.body, self.recompute = body, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
        return self.body(x)
