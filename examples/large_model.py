"""A model that is nowhere whole: built without memory, planned, filled stage by stage, trained.

    python examples/large_model.py
    python examples/large_model.py --width 2048 --layers 24   # 1.2 B parameters

The parameters get memory on the devices of their stages, and nowhere else. Recomputation keeps the
activations down; the memory report says before anything runs what each stage will need.
"""

import argparse
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

LENGTH, CHUNKS, STAGES = 64, 4, 4


def transformer(tokens: int, width: int, layers: int) -> nn.Sequential:
    """A causal language model, marked into stages of as many layers each."""

    class Causal(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return super().forward(x, src_mask=mask, is_causal=True)

    stack = [
        Causal(width, width // 32, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    model = nn.Sequential(nn.Embedding(tokens, width), *stack, nn.Linear(width, tokens))
    for stage in range(STAGES):
        first = stage * layers // STAGES + (stage > 0)
        # The last stage has one micro-batch at a time: there is nothing to gain there.
        bp.BeginBlock(model[first], stage=stage, checkpoint=stage < STAGES - 1)
    return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Plan, fill, train for some steps, save, and load into other stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = [f"cuda:{i * gpus // STAGES}" for i in range(STAGES)] if gpus else ["cpu"] * STAGES

    def batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(len(data) - LENGTH - 1, (16,)).tolist()
        text = torch.stack([data[i : i + LENGTH + 1] for i in at])
        return text[:, :-1], text[:, 1:]

    with torch.device("meta"):
        model = transformer(128, options.width, options.layers)
    x, y = batch()
    pipe = bp.Pipeline(model, devices=devices, chunks=CHUNKS, init="reset_parameters")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, none of them in memory\n")
    print(pipe.memory(x, optimizer="adamw"), "\n")

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # of what has no memory yet
    losses = []
    for step in range(options.steps):
        x, y = batch()
        optimizer.zero_grad()
        # The first step places the model: each tensor on its stage's device.
        losses.append(pipe.forward_backward(x, target=y, loss_fn=loss_of).loss.item())
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
    with pipe.measured_memory(optimizer) as report:
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
    print(f"\nmeasured beside the prediction:\n{report}\n")

    with tempfile.TemporaryDirectory() as directory:
        pipe.save_weights(directory)
        print("saved:", ", ".join(sorted(p.name for p in Path(directory).iterdir())))
        with torch.device("meta"):
            again = bp.remove_blocks(transformer(128, options.width, options.layers))
        bp.begin_blocks(again, {str(options.layers // 2): 1})  # two stages instead of four
        other = bp.Pipeline(again.eval(), devices=devices[-2:], chunks=CHUNKS, weights=directory)
        with torch.no_grad():
            loss = loss_of(other(x), y.to(other.output_device)).item()
    print(f"loaded into two stages: loss {loss:.3f}")
    pipe.close()
    if losses[-1] > losses[0] - 1:
        raise SystemExit(f"the loss went only from {losses[0]:.2f} to {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
