"""A model that ``device_map`` has spread over the devices, trained with all of them at work.

    pip install transformers accelerate
    python examples/from_device_map.py

The language model is made here, so that nothing is downloaded: put a name of the Hub in the place
of ``folder``. With several accelerators ``device_map="auto"`` says which layers are where; without,
the script writes down a map of two threads on the CPU.
"""

import argparse
import tempfile
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import blockpipe as bp

LENGTH, BATCH, LAYERS = 64, 16, 4


def main() -> None:
    """Load, train as device_map does it, train as a pipeline, and generate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_a_model(folder)
        if torch.accelerator.device_count() > 1:
            model, device_map = (
                AutoModelForCausalLM.from_pretrained(folder, device_map="auto"),
                None,
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
            device_map = two_threads()
    text = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    batches = [batch_of(text) for _ in range(steps)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pipe = bp.from_device_map(model, device_map, chunks=4)
    begin = time.perf_counter()
    for step, tokens in enumerate(batches):
        # Instead of loss = model(…).loss; loss.backward(): the gradients are there after it.
        loss = pipe.forward_backward(input_ids=tokens, labels=tokens).loss
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            print(f"step {step}: loss {loss:.2f}")
    print(f"{steps * BATCH / (time.perf_counter() - begin):.0f} samples/s on {pipe.devices}")
    print(pipe.verify(input_ids=batches[0], labels=batches[0]))

    prompt = text[None, :16]
    made = pipe.run(model.generate, prompt, max_new_tokens=40, do_sample=False)
    print(repr(bytes(made[0].tolist()).decode("utf-8", "replace")))
    pipe.unplace()  # from here on the model is what from_pretrained returned, with other values
    model.eval()
    with torch.no_grad():
        print(f"loss without the pipeline: {model(input_ids=tokens, labels=tokens).loss:.2f}")


def save_a_model(folder: str) -> None:
    """A small Llama that reads bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        max_position_embeddings=2 * LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def two_threads() -> dict[str, str]:
    """Half of the layers each, as ``model.hf_device_map`` has it."""
    layers = {f"model.layers.{i}": f"cpu:{2 * i // LAYERS}" for i in range(LAYERS)}
    return {"model.embed_tokens": "cpu:0", **layers, "model.norm": "cpu:1", "lm_head": "cpu:1"}


def batch_of(text: Tensor) -> Tensor:
    """Pieces of the text, from anywhere."""
    starts = torch.randint(len(text) - LENGTH, (BATCH,))
    return torch.stack([text[start : start + LENGTH] for start in starts])


if __name__ == "__main__":
    main()
