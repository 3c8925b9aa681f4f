"""LoRA in a pipeline: a GPT-2 whose own weights are frozen, in two stages.

    python examples/peft_gpt.py

The model has random weights and is small, so that nothing is downloaded; put your own
``from_pretrained`` in ``gpt()``. It learns sequences that count upwards. Runs on the GPUs of the
machine, or on the CPU.
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import blockpipe as bp

WORDS, LENGTH, STEPS = 32, 24, 60


def gpt() -> nn.Module:
    """Four layers, the last two on the second stage."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    return bp.begin_blocks(GPT2LMHeadModel(config), {"transformer.h.2": 1})


def counting(rows: int) -> Tensor:
    """Token numbers [rows, LENGTH] that count upwards from a random one."""
    return (torch.randint(0, WORDS, (rows, 1)) + torch.arange(LENGTH)) % WORDS


def devices() -> list[str]:
    """A device for each of the two stages: the first and the last GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    return ["cuda:0", f"cuda:{gpus - 1}"] if gpus else ["cpu", "cpu"]


def main() -> None:
    """Adapt the model, save the adapters, and load them into another copy of the model."""
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
    )
    model = get_peft_model(gpt(), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    print(f"{100 * share:.1f} % of the parameters are trained")

    pipe = bp.Pipeline(model, devices=devices(), chunks=4)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(STEPS):
        ids = counting(32)
        optimizer.zero_grad()
        loss = pipe.forward_backward(ids, labels=ids).loss
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss:.3f}")

    pipe.eval()
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        pipe.module.save_pretrained(directory)
        loaded = PeftModel.from_pretrained(gpt(), directory).eval()
        ids = counting(4)
        difference = loaded(ids).logits - pipe(ids).logits.cpu()
    print(f"loaded into a plain model: logits differ by {difference.abs().max():.0e}")


if __name__ == "__main__":
    main()
