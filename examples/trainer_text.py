"""Hugging Face's Trainer with one class changed: a small GPT-2 on two stages learns English.

    python examples/trainer_text.py

Compare the line marked below with ``trainer = Trainer(``. The text is Python's own language
reference, which CPython ships in ``pydoc_data.topics``; characters are the tokens, and the model is
made from a configuration, so that nothing is downloaded. Runs on the GPUs of the machine, or on the
CPU.
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from blockpipe.integrations.transformers import PipelineTrainer

LENGTH = 32


def rows_of(text: str, tokens: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    """The text in rows of ``LENGTH`` characters; a language model's labels are its inputs."""
    ids = torch.tensor([tokens[character] for character in text])
    return [
        {"input_ids": row, "labels": row}
        for row in ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    ]


def small_gpt2(words: int) -> GPT2LMHeadModel:
    """Return a language model of two layers."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train, evaluate, save, and write a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", default="runs/trainer-text")
    options = parser.parse_args()

    text = "".join(topics.values())[:200_000]
    characters = sorted(set(text))
    rows = rows_of(text, {character: n for n, character in enumerate(characters)})
    model = small_gpt2(len(characters))
    args = TrainingArguments(
        options.directory,
        max_steps=options.steps,
        per_device_train_batch_size=32,  # of the whole pipeline
        per_device_eval_batch_size=64,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
    )
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    trainer = PipelineTrainer(  # the line that was changed
        model,
        args,
        train_dataset=rows[400:],
        eval_dataset=rows[:400],
        pipeline={
            "devices": (gpus or ["cpu"]) * 2 if len(gpus) < 2 else gpus[:2],
            "chunks": 4,
            "stages": {"transformer.h.1": 1},
        },
    )
    trainer.train()
    print(f"loss on other text: {trainer.evaluate()['eval_loss']:.2f}")
    print(trainer.pipe)

    trainer.save_model()
    again = GPT2LMHeadModel.from_pretrained(options.directory)  # on one device
    start = rows[0]["input_ids"][None, :16]
    ids = again.generate(start, max_new_tokens=16, do_sample=False, pad_token_id=0)
    print("".join(characters[n] for n in ids[0]))


if __name__ == "__main__":
    main()
