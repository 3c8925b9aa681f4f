"""The models of the benchmarks on accelerators: full sizes, each a chain of many blocks; and data.

A chain can be cut in any number of stages, block by block measured, and compiled block by block.
Long skips pass by the blocks between; which block takes which is data, so that one can compute with
it. The models of workloads.py have two children instead, because other libraries ask for that.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import torch
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn
from workloads import DecoderLayer, Embedding

import blockpipe as bp

Batch = Callable[[int], tuple[Tensor, Tensor]]  # rows -> inputs, target


class Chain(nn.Sequential):
    """Blocks one after the other; some also take what an earlier one made.

    Args:
        blocks: from a tensor, or from two, to a tensor.
        skips: from the number of a block that takes two tensors to that of the block that made the
            second one. What a block made is taken once.
    """

    def __init__(self, blocks: Iterable[nn.Module], skips: Mapping[int, int] | None = None) -> None:
        super().__init__(*blocks)
        self.skips = dict(skips or {})

    def forward(self, input: Tensor) -> Tensor:
        made, sources = input, set(self.skips.values())
        kept: dict[int, Tensor] = {}
        for index, block in enumerate(self):
            beside = (kept.pop(self.skips[index]),) if index in self.skips else ()
            made = block(made, *beside)
            if index in sources:
                kept[index] = made
        return made


def mark(chain: Chain, stages: int) -> Chain:
    """Begin stages at blocks, with about the same number of blocks in each; returns the chain."""
    begins = {str(stage * len(chain) // stages): stage for stage in range(1, stages)}
    bp.begin_blocks(chain, begins)
    return chain


def gpt(*, width: int, heads: int, layers: int, vocabulary: int, length: int) -> Chain:
    """A causal language model: the embedding, the layers, and the head."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    stack = (DecoderLayer(width, heads) for _ in range(layers))
    return Chain([Embedding(vocabulary, length, width), *stack, head])


def resnet101(classes: int = 1000) -> Chain:
    """torchvision's ResNet-101: the stem, 33 bottlenecks, and the head."""
    net = torchvision.models.resnet101(num_classes=classes)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    levels = (net.layer1, net.layer2, net.layer3, net.layer4)
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return Chain([stem, *(block for level in levels for block in level), head])


def small(width: int, layers: int) -> Chain:
    """Layers so small that a device waits for the host, which launches their kernels."""
    return Chain(
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        for _ in range(layers)
    )


class UpAndJoin(nn.Module):
    """A level's begin on a U-Net's way up: twice the size, and the skip beside it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2)
        self.body = body

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.body(torch.cat([self.up(x), skip], 1))
        return joined


def convolution(before: int, after: int) -> nn.Sequential:
    """The unit of which torchgpipe's U-Net is made, without its dropout: gradients are compared."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.InstanceNorm2d(after),
        nn.LeakyReLU(0.01),
    )


def level(before: int, hidden: int, after: int, convolutions: int) -> list[nn.Module]:
    """The units at one size of image."""
    widths = [before, *[hidden] * (convolutions - 1), after]
    return [convolution(a, b) for a, b in pairwise(widths)]


def unet(convolutions: int = 5, base: int = 64, depth: int = 5) -> Chain:
    """torchgpipe's U-Net (5, 64): convolutions a level, channels of the first level.

    Source: ``benchmarks/models/unet`` of torchgpipe, whose layers and widths these are. A block is
    one convolution, with the pooling or the joining before it.
    """
    blocks: list[nn.Module] = []
    skips: dict[int, int] = {}
    ends = []
    before = 3
    for width in (base * 2**n for n in range(depth)):
        first, *rest = level(before, width, width, convolutions)
        blocks += [nn.Sequential(nn.MaxPool2d(2), first) if blocks else first, *rest]
        ends.append(len(blocks) - 1)
        before = width
    first, *rest = level(before, 2 * before, before, convolutions)
    blocks += [nn.Sequential(nn.MaxPool2d(2), first), *rest]
    for end in reversed(ends):
        width = before // 2
        first, *rest = level(2 * before, width, width, convolutions)
        skips[len(blocks)] = end
        blocks += [UpAndJoin(first), *rest]
        before = width
    return Chain([*blocks, nn.Conv2d(before, 1, 1, bias=False)], skips)


def texts(vocabulary: int, length: int) -> Batch:
    """Token sequences, and the next token at each place."""

    def sample(rows: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (rows, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return sample


def masks(size: int) -> Batch:
    """Images, and for each pixel whether it belongs to what is looked for."""
    return lambda rows: (torch.randn(rows, 3, size, size), torch.rand(rows, 1, size, size).round())
