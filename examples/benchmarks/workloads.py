"""The models of the benchmarks: each an ``nn.Sequential`` of two stages of about equal time.

Two children and no more, because that is what every pipeline library takes. What crosses the
border is a tensor or a flat tuple of tensors. The models are hand-made, so that a benchmark needs
nothing but torch, and cut where the two stages were measured to take about the same time, forward
and backward together.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Border = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A model, the data of a micro-batch, and the loss."""

    model: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, Tensor]]  # rows -> inputs, target
    rows: int  # in a micro-batch
    loss: Callable[[Tensor, Tensor], Tensor]  # a mean over the rows

    def sample(self, chunks: int) -> tuple[nn.Sequential, Tensor, Tensor]:
        """The model and a batch of so many micro-batches; the same ones in every process."""
        torch.manual_seed(0)
        return self.model(), *self.batch(chunks * self.rows)


def mlp(width: int, layers: int) -> nn.Sequential:
    """Linear layers and ReLUs in two halves."""
    halves = ([nn.Linear(width, width) for _ in range(layers // 2)] for _ in range(2))
    return nn.Sequential(
        *(nn.Sequential(*(m for layer in half for m in (layer, nn.ReLU()))) for half in halves)
    )


class DecoderLayer(nn.Module):
    """A transformer's pre-norm layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Embedding(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.tokens(tokens)
        return vectors + self.places[: tokens.shape[1]]


VOCABULARY, LENGTH = 512, 64


def gpt(width: int = 192, heads: int = 6, layers: int = 6) -> nn.Sequential:
    """A small causal language model: the embedding and half of the layers, the rest and a head."""
    stack = [DecoderLayer(width, heads) for _ in range(layers)]
    half = layers // 2
    return nn.Sequential(
        nn.Sequential(Embedding(VOCABULARY, LENGTH, width), *stack[:half]),
        nn.Sequential(*stack[half:], nn.LayerNorm(width), nn.Linear(width, VOCABULARY)),
    )


def convolution(before: int, after: int) -> nn.Sequential:
    """3x3, normalized in groups, so that micro-batches of any size are alike."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(inplace=True)
    )


class Encoder(nn.Module):
    """A U-Net's way down, and its deepest level: the skips and the bottom, as one tuple."""

    def __init__(self, widths: tuple[int, ...], deepest: int) -> None:
        super().__init__()
        pairs = zip((3, *widths[:-2]), widths[:-1], strict=True)
        self.levels = nn.ModuleList(
            nn.Sequential(convolution(a, b), convolution(b, b)) for a, b in pairs
        )
        self.bottom = nn.Sequential(
            convolution(widths[-2], widths[-1]),
            *(convolution(widths[-1], widths[-1]) for _ in range(deepest - 1)),
        )

    def forward(self, x: Tensor) -> Border:
        skips = []
        for level in self.levels:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        return *skips, self.bottom(x)


class Decoder(nn.Module):
    """A U-Net's way up."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.levels = nn.ModuleList(
            nn.Sequential(convolution(2 * b, b), convolution(b, b)) for _, b in pairs
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, border: Border) -> Tensor:
        *skips, x = border
        for up, level, skip in zip(self.ups, self.levels, reversed(skips), strict=True):
            x = level(torch.cat([skip, up(x)], 1))
        output: Tensor = self.head(x)
        return output


def unet(widths: tuple[int, ...] = (16, 32, 64), deepest: int = 4) -> nn.Sequential:
    """A U-Net: long skips cross the border. The bottom is deep to weigh as much as the way up."""
    return nn.Sequential(Encoder(widths, deepest), Decoder(widths, 2))


class Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(width: int = 24, cut: int = 4) -> nn.Sequential:
    """Eight basic blocks, as resnet18 has, narrower and for small images."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks, before = [], width
    for level in range(4):
        after = width * 2**level
        blocks += [Residual(before, after, 2 if level else 1), Residual(after, after, 1)]
        before = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(nn.Sequential(*stem, *blocks[:cut]), nn.Sequential(*blocks[cut:], *head))


def vectors(width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Vectors to be mapped to vectors."""
    return lambda rows: (torch.randn(rows, width), torch.randn(rows, width))


def texts(rows: int) -> tuple[Tensor, Tensor]:
    """Token sequences, and the next token at each place."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(size: int, classes: int, *, dense: bool) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Images with a class each, or with one for each pixel."""
    return lambda rows: (
        torch.randn(rows, 3, size, size),
        torch.randint(classes, (rows, size, size) if dense else (rows,)),
    )


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


WORKLOADS = {
    "mlp": Workload(lambda: mlp(512, 8), vectors(512), 128, F.mse_loss),
    "gpt": Workload(gpt, texts, 2, token_loss),
    "unet": Workload(unet, images(64, 2, dense=True), 4, F.cross_entropy),
    "resnet": Workload(resnet, images(32, 10, dense=False), 3, F.cross_entropy),
    "tiny": Workload(lambda: mlp(16, 100), vectors(16), 16, F.mse_loss),
}


def stage_seconds(workload: Workload, repeats: int = 20) -> list[float]:
    """Median time of each stage's forward and backward of one micro-batch, cut at the border."""
    stages, x, y = workload.sample(1)
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        begun = time.perf_counter()
        made = stages[0](x)
        forward = time.perf_counter() - begun
        atomic = isinstance(made, Tensor)
        outputs = (made,) if atomic else made
        border = tuple(t.detach().requires_grad_() for t in outputs)
        begun = time.perf_counter()
        workload.loss(stages[1](border[0] if atomic else border), y).backward()
        times[1].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        torch.autograd.backward(outputs, [t.grad for t in border])
        times[0].append(time.perf_counter() - begun + forward)
    return [statistics.median(values) for values in times]
