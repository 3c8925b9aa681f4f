"""Models of four stages: with skips, tied weights, integers, and an encoder beside a decoder."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp

_SMALL: dict[str, Any] = {"vocab_size": 50, "use_cache": False}


class UNet(nn.Module):
    """Skips of two lengths, and an input in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up1, self.up2 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with bp.Block(0):
            a = F.relu(self.down1(x))
        with bp.Block(1):
            b = F.relu(self.down2(a))
        with bp.Block(2):
            m = self.middle(b)
        with bp.Block(3):
            y = F.interpolate(self.up1(torch.cat([m, b], 1)), scale_factor=2)
            return {"out": self.up2(torch.cat([y, a], 1)), "given": x}


class Integers(nn.Module):
    """An integer input of the last stage, writes in place, a buffer, ``no_grad``, a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.embedding = nn.Embedding(10, 8)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: Tensor, *, index: Tensor, scale: float = 2.0) -> Tensor:
        with bp.Block(0):
            h = self.first(x)
        with bp.Block(1):
            h = self.second(h) * scale
        with bp.Block(2):
            h[:, torch.arange(2, device=x.device)] += 1.0
            h[..., 1:] *= 0.5
            h += self.offset
            with torch.no_grad():
                most = h.abs().max()
        with bp.Block(3):
            return h / most + self.embedding(index)


def ids(size: int) -> Tensor:
    """Tokens."""
    return torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(0))


def resnet() -> nn.Module:
    """A residual network that is cut inside of a block, too."""
    torch.manual_seed(0)
    net = pytest.importorskip("torchvision").models.resnet18()
    return bp.begin_blocks(net, {"layer2": 1, "layer4.0.bn1": 2, "fc": 3})


def gpt() -> nn.Module:
    """A GPT with tied weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        **_SMALL,
        **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
        **dict.fromkeys(["bos_token_id", "eos_token_id"], 0),
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    return bp.begin_blocks(model, {"transformer.h.1": 1, "transformer.h.3": 2, "lm_head": 3})


def llama() -> nn.Module:
    """A Llama with rotary embeddings."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, **_SMALL
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    return bp.begin_blocks(model, {"model.layers.1": 1, "model.layers.3": 2, "lm_head": 3})


def t5(dropout_rate: float = 0.0) -> nn.Module:
    """An encoder and a decoder, with one embedding."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        **_SMALL,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=dropout_rate,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    return bp.begin_blocks(model, {"encoder.block.1": 1, "decoder": 2, "decoder.block.1": 3})


class Glue(nn.Module):
    """Two layers, and code of a test's between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.between(self, h)
        with bp.Block(1):
            return self.second(h)
