"""Models and helpers of several test files."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpipe.compat import poptorch


class Network(nn.Module):
    """The tutorial's: four stages, by the IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = torch.nn.Linear(5, 10)
        self.layer2 = torch.nn.Linear(10, 5)
        self.layer3 = torch.nn.Linear(5, 5)
        self.layer4 = torch.nn.Linear(5, 5)

        self.act = torch.nn.ReLU()
        self.softmax = torch.nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = self.act(self.layer1(x))

        with poptorch.Block(ipu_id=1):
            x = self.act(self.layer2(x))

        with poptorch.Block(ipu_id=2):
            x = self.act(self.layer3(x))
            x = self.act(self.layer4(x))

        with poptorch.Block(ipu_id=3):
            x = self.softmax(x)
        return x  # noqa: RET504 - as the tutorial has it


class WithLoss(nn.Module):
    """Any model, with the loss where PopTorch's users have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.model(x)
        return out if labels is None else (out, F.cross_entropy(out, labels))


class Scripted(nn.Module):
    """Layers of one size, and a forward that is given."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.script = script

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(self, *args, **kwargs)


def two_stages() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    poptorch.BeginBlock(net[2], ipu_id=1)
    return net


def accumulating(count: int, copies: int = 1) -> poptorch.Options:
    opts = poptorch.Options().replicationFactor(copies)
    opts.Training.gradientAccumulation(count)
    return opts


def two_parts() -> poptorch.Options:
    """For inference: two micro-batches, so that two devices can be at work."""
    return poptorch.Options().deviceIterations(2)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(0, 3, (size,))
