"""Annotate: a handwritten GPT with ``with Block``, tied embedding and all, on real English text.

    python examples/gpt_text.py

The text is Python's own language reference, about 700 kB, which CPython ships in
``pydoc_data.topics``. Characters are the tokens. The embedding is on the first stage, and the
output projection, which shares its weight, on the last.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp


class Layer(nn.Module):
    """A transformer layer: causal attention and a feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, length, width] to the same."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A GPT whose forward says itself where its stages begin."""

    def __init__(self, tokens: int, length: int, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """From [batch, length] to logits [batch, length, tokens]."""
        half = len(self.layers) // 2
        with bp.Block(stage=0, name="bottom"):
            x = self.embed(ids) + self.position[: ids.shape[1]]
            for layer in self.layers[:half]:
                x = layer(x)
        with bp.Block(stage=1, name="top"):
            for layer in self.layers[half:]:
                x = layer(x)
            return self.norm(x) @ self.embed.weight.T  # tied: read here, lives on stage 0


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.no_grad()
def write(pipe: bp.Pipeline, start: Tensor, count: int, length: int) -> Tensor:
    """Continue a text by the most likely characters, with a little chance."""
    ids = start
    for _ in range(count):
        logits = pipe(ids[:, -length:])[:, -1].cpu()
        ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(-1), 1)], 1)
    return ids[0]


def main() -> None:
    """Train for some steps and write a little."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    text = "\n".join(topics.values())
    characters = sorted(set(text))
    index = {c: i for i, c in enumerate(characters)}
    data = torch.tensor([index[c] for c in text])
    print(f"{len(text):,} characters, {len(characters)} different")

    model = GPT(len(characters), options.length)
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = [torch.device("cuda", i * gpus // 2) for i in range(2)] if gpus else ["cpu"] * 2
    pipe = bp.Pipeline(model, devices=devices, chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    print(pipe.summary(data[: options.length].repeat(32, 1)), "\n")
    first = last = math.nan
    for step in range(options.steps):
        at = torch.randint(len(data) - options.length - 1, (32,)).tolist()
        x = torch.stack([data[i : i + options.length] for i in at])
        y = torch.stack([data[i + 1 : i + 1 + options.length] for i in at])
        optimizer.zero_grad()
        loss = pipe.forward_backward(x, target=y, loss_fn=loss_of).loss.item()
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()
        first, last = (loss if math.isnan(first) else first), loss
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)
    pipe.eval()
    written = write(pipe, data[:16][None], 120, options.length)
    print("".join(characters[i] for i in written.tolist()))
    pipe.close()
    if last > first - 1:
        raise SystemExit(f"the loss went only from {first:.2f} to {last:.2f}")


if __name__ == "__main__":
    main()
