"""Accelerate's training loop with a pipeline: handwritten digits on two stages, with a checkpoint.

    python examples/accelerate_digits.py

The data is scikit-learn's digits (1797 images of 8×8 pixels), which its package ships. Runs on the
GPUs of the machine, or on the CPU.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import blockpipe as bp
from blockpipe.integrations.accelerate import PipelineAccelerator

EPOCHS = 6


def digits() -> TensorDataset:
    """Images [n, 1, 8, 8] in 0..1 and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
    return TensorDataset(rows, torch.tensor(labels))


def classifier() -> nn.Sequential:
    """One layer on one stage, two on the next."""
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return bp.begin_blocks(net, {"3": 1})


def main() -> None:
    """Train half of the epochs, save, load into a new model, train the rest, and test."""
    torch.manual_seed(0)
    training_data, test_data = random_split(digits(), [0.8, 0.2])
    with tempfile.TemporaryDirectory() as directory:
        for begin, end in ((0, EPOCHS // 2), (EPOCHS // 2, EPOCHS)):
            accelerator = PipelineAccelerator(
                mixed_precision="bf16" if torch.cuda.is_available() else "no",
                gradient_accumulation_steps=2,
                step_scheduler_with_optimizer=False,
            )
            pipe = bp.Pipeline(classifier(), devices=devices(), chunks=4)
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
            training = DataLoader(training_data, batch_size=64, shuffle=True)
            test = DataLoader(test_data, batch_size=120)
            pipe, optimizer, scheduler, training, test = accelerator.prepare(
                pipe, optimizer, scheduler, training, test
            )
            if begin:
                accelerator.load_state(directory)
                print("resumed")
            for epoch in range(begin, end):
                pipe.train()
                losses = []
                for images, labels in training:
                    with accelerator.accumulate(pipe):
                        result = accelerator.forward_backward(
                            pipe, images, target=labels, loss_fn=F.cross_entropy
                        )
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(pipe.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(result.loss)
                scheduler.step()
                accelerator.print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")
            accelerator.save_state(directory)

    pipe.eval()
    right = 0
    for images, labels in test:
        with torch.no_grad():
            found = pipe(images).argmax(1).to(labels.device)
        right += int(accelerator.gather_for_metrics(found == labels).sum())
    print(f"test accuracy: {100 * right / len(test_data):.1f} %")


def devices() -> list[str]:
    """A device for each of the two stages: the first and the last GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    return ["cuda:0", f"cuda:{gpus - 1}"] if gpus else ["cpu", "cpu"]


if __name__ == "__main__":
    main()
